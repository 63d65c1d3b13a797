"""CARAMEL (arXiv 2004.14020): what each of its parts brings to an all-reduce, and what its gain depends on.

Used by ``ordered_transfers.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from experiments.transfer_networks import TESLA_K80, computing_s, workload
from pipetrain.logs import text_table
from pipetrain.plan.roofline import TESLA_P40, Device
from pipetrain.schemes.transfers.caramel import CHUNKS, caramel, packed, step_s
from pipetrain.schemes.transfers.plan import Message, Workload, backward_order

NETWORKS = ("alexnet", "googlenet", "inception_v3", "resnet50", "resnet101", "vgg16")
NODES = (8, 16)
DEVICES = (TESLA_K80, TESLA_P40)
ROWS = 32
BYTES_PER_S = 10e9 / 8
HOPS_US = (10, 20, 50, 100, 200, 500, 1000)  # that a message takes to a ring's next device, beside its bytes
USUAL_US = 50
PUBLISHED = 3.62  # times as fast at most
# What is added one after another.
WAYS = ("after", "as-made", "packs", "chunks", "next-forward", "reordered")
ABOUT = {
    "after": "each variable, after the backward",
    "as-made": "each variable as the backward makes it",
    "packs": "+ small variables together",
    "chunks": "+ large ones in as many chunks as suit",
    "next-forward": "+ some in the next forward",
    "reordered": "+ branches in another order",
}


class Cell(NamedTuple):
    """A network on so many devices, and what a hop of a ring takes beside the bytes."""

    network: str
    device: Device
    nodes: int
    hop_us: int

    def __str__(self) -> str:
        return f"{self.network}, {self.device.name}, {self.nodes} nodes, {self.hop_us} us"


class Outcome(NamedTuple):
    """A step in one of the ways, and which part of it the device computes."""

    network: str
    device: str
    nodes: int
    hop_us: int
    way: str
    step_ms: float
    computing_part: float


def cells(networks: Sequence[str], nodes: Sequence[int]) -> list[Cell]:
    """All that is computed."""
    return [Cell(*each) for each in itertools.product(networks, DEVICES, nodes, HOPS_US)]


def ring(nodes: int, hop_s: float) -> Message:
    """What an all-reduce takes in a ring: ``2 (N-1)`` hops, in each of which an N-th of the bytes is sent."""
    return Message(2 * (nodes - 1) * hop_s, 2 * (nodes - 1) / nodes / BYTES_PER_S)


def reordered(made: Workload) -> Workload:
    """Branches in an order in which the backward makes most bytes of gradients soonest.

    Of the blocks whose outputs' gradients are there, that one runs backward whose way on, as far as it has no fork or
    join, makes the most bytes a second. Forward they run the other way round.
    """
    readers: list[list[int]] = [[] for _ in made.layers]
    for k, layer in enumerate(made.layers):
        for before in layer.after:
            readers[before].append(k)
    left = [len(each) for each in readers]
    ready, order = [k for k, count in enumerate(left) if not count], list[int]()
    while ready:
        k = max(ready, key=lambda each: (_density(made, readers, each), each))
        ready.remove(k)
        order.append(k)
        for before in made.layers[k].after:
            left[before] -= 1
            if not left[before]:
                ready.append(before)
    places = {k: place for place, k in enumerate(reversed(order))}
    layers = [
        replace(made.layers[k], after=tuple(sorted(places[each] for each in made.layers[k].after)))
        for k in reversed(order)
    ]
    return replace(made, layers=tuple(layers))


def _density(made: Workload, readers: Sequence[Sequence[int]], k: int) -> float:
    """The most bytes of gradients a second of a block and those before it, up to a fork or a join."""
    bytes_, seconds, best = 0.0, 0.0, 0.0
    while True:
        bytes_ += sum(made.sizes_bytes[n] for n in made.owned[k])
        seconds += made.layers[k].backward_s
        best = max(best, bytes_ / seconds if seconds else 0.0)
        before = made.layers[k].after
        if len(before) != 1 or len(readers[before[0]]) != 1:
            return best
        k = before[0]


def ablation(made: Workload) -> dict[str, float]:
    """The seconds of a step, part after part added."""
    each = [made.pack([n]) for n in backward_order(made)]
    other = reordered(made)
    found = {
        "after": computing_s(made) + sum(made.message.seconds(pack.size_bytes) for pack in each),
        "as-made": step_s(made, each, ()),
        "packs": step_s(made, packed(made, 1), ()),
        "chunks": min(step_s(made, packed(made, most), ()) for most in CHUNKS),
        "next-forward": _planned_s(made),
    }
    return {**found, "reordered": min(found["next-forward"], _planned_s(other))}


def _planned_s(made: Workload) -> float:
    plan = caramel(made)
    return step_s(made, plan.pushes.packs, plan.late.packs)


def outcomes(cell: Cell) -> list[Outcome]:
    """One network, way after way."""
    made = workload(cell.network, cell.device, ROWS, ring(cell.nodes, 1e-6 * cell.hop_us))
    about = cell.network, cell.device.name, cell.nodes, cell.hop_us
    alone_s = computing_s(made)
    return [Outcome(*about, way, 1e3 * each_s, alone_s / each_s) for way, each_s in ablation(made).items()]


def gains(found: Sequence[Outcome], over: str) -> dict[tuple[str, str, int, int], float]:
    """How many times as fast all parts together are as one of the ways."""
    best = {each[:4]: each.step_ms for each in found if each.way == "reordered"}
    return {each[:4]: each.step_ms / best[each[:4]] for each in found if each.way == over}


def report(found: Sequence[Outcome]) -> str:
    """What each part brings with usual hops, and with which hops the published gain is met."""
    most = max(each.nodes for each in found)
    usual = [each for each in found if each.hop_us == USUAL_US and each.nodes == most]
    names = [*dict.fromkeys(each[:2] for each in usual)]
    steps = {(*each[:2], each.way): each for each in usual}
    header = ("network", "device", *(f"{way} ms" for way in WAYS))
    rows = [(*name, *(f"{steps[(*name, way)].step_ms:.0f}" for way in WAYS)) for name in names]
    shares = [(*name, *(f"{steps[(*name, way)].computing_part:.0%}" for way in WAYS)) for name in names]
    met = []
    for name in names:
        row = [*name]
        for over in ("after", "as-made"):
            of_name = {key[3]: gain for key, gain in gains(found, over).items() if key[:3] == (*name, most)}
            first = next((hop for hop, gain in of_name.items() if gain >= PUBLISHED), None)
            row += [f"{of_name[USUAL_US]:.2f}x", f"{max(of_name.values()):.2f}x", f"{first} us" if first else "-"]
        met.append(tuple(row))
    columns = [
        f"{what} {over}"
        for over in ("over after", "over as-made")
        for what in ("gain", "at most", f"{PUBLISHED}x from")
    ]
    ways = "\n".join(f"  {way:<14}{about}" for way, about in ABOUT.items())
    return "\n\n".join(
        (
            f"CARAMEL: a step on {most} devices in a ring, hops of {USUAL_US} us, {ROWS} rows; ways:\n{ways}",
            text_table(header, rows),
            f"Part of a step in which a device computes\n\n{text_table(('network', 'device', *WAYS), shares)}",
            f"Gains of all parts, hops of {USUAL_US} us, and of up to {HOPS_US[-1]} us; published: up to {PUBLISHED}x"
            f"\n\n{text_table(('network', 'device', *columns), met)}",
        )
    )
