"""iBatch (AAAI 2019): neighbouring layers in one message, over 1 to 72 nodes, with its two algorithms as printed.

Times are by the source's own model: batch k of weights has arrived after ``k T_s`` and its bytes. Used by
``ordered_transfers.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from experiments.transfer_networks import NINTH_OF_BLADE, workload
from pipetrain.logs import text_table
from pipetrain.schemes.compression import FLOAT_BYTES, TopK
from pipetrain.schemes.transfers.ibatch import (
    LayerChain,
    chain_of,
    computing_hidden,
    optimum,
    transfers_hidden,
)
from pipetrain.schemes.transfers.plan import Message, Workload
from pipetrain.simulation.profiled import squarish

NETWORKS = ("googlenet", "inception_v3", "vgg19", "vgg19_22k")
NODES = (1, 2, 4, 8, 16, 24, 36, 48, 72)
GBIT = 1e9 / 8
PUBLISHED = {"one message": 1.73, "layer by layer": 1.41}  # on 72 nodes at most
WAYS = ("one message", "layer by layer", "transfers hidden", "computing hidden", "exact")
SPARSE = TopK(0.01)  # of the gradients that are sent
# What the search tries: T_s, latency that a message takes beside T_s, in ms, Gb/s of a server, rows of a worker.
STARTUPS_MS = (0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 70.0, 100.0, 150.0, 200.0)
LATENCIES_MS = (0.0, 10.0)
GBITS = (0.1, 0.18, 0.25, 0.35, 0.5, 0.75, 10 / 9, 1.6, 2.5, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16)


class Setting(NamedTuple):
    """What a message takes: its startup, its latency, a server's bandwidth; and the rows of a worker."""

    startup_ms: float
    latency_ms: float
    gbit_per_s: float
    rows: int

    def __str__(self) -> str:
        return (
            f"T_s {self.startup_ms:g} ms, latency {self.latency_ms:g} ms, {self.gbit_per_s:.3g} Gb/s, {self.rows} rows"
        )


USUAL = Setting(0.5, 0.0, 10 / 9, 1)  # of processes that are joined by TensorFlow; a ninth of a host's 10 Gb/s


class Cell(NamedTuple):
    """A network in a setting on so many nodes, or the search for one in which it gains what is published."""

    network: str
    nodes: int
    searched: bool

    def __str__(self) -> str:
        return f"{self.network}, {self.nodes} nodes" + ", search" * self.searched


class Outcome(NamedTuple):
    """A step: seconds by what they go to, and in how many messages weights are pulled."""

    kind: str  # "curve", in a usual or the found setting, or "search"
    network: str
    nodes: int
    startup_ms: float
    latency_ms: float
    gbit_per_s: float
    rows: int
    gradients: str
    way: str
    step_ms: float
    computing_ms: float
    startups_ms: float
    transfers_ms: float
    pulls: int

    @property
    def setting(self) -> Setting:
        """What a message takes."""
        return Setting(*self[3:7])


def cells(networks: Sequence[str], nodes: Sequence[int]) -> list[Cell]:
    """All that is computed: first the search of each network, whose setting its curve then has too."""
    most = max(nodes)
    return [
        each for name in networks for each in (Cell(name, most, True), *(Cell(name, size, False) for size in nodes))
    ]


def outcomes(cell: Cell, found: Sequence[Outcome]) -> list[Outcome]:
    """One cell; ``found`` is what is known by then."""
    if cell.searched:
        return [nearest(cell.network, cell.nodes)]
    settings = [("curve", USUAL)]
    settings += [("found", each.setting) for each in found if each.kind == "search" and each.network == cell.network]
    return [
        each
        for kind, setting in settings
        for sparse in (False, True)
        for each in steps(kind, cell.network, cell.nodes, setting, sparse)
    ]


class _Step:
    """A step of a network on so many nodes, of which every one is a server too."""

    def __init__(self, network: str, nodes: int, setting: Setting, sparse: bool = False) -> None:
        startup_s = setting.startup_ms / 1e3 if nodes > 1 else 0.0
        message = Message(startup_s, (nodes - 1) / nodes / (setting.gbit_per_s * GBIT))
        made = workload(network, NINTH_OF_BLADE, setting.rows, message)
        self._latency_s = setting.latency_ms / 1e3 if nodes > 1 else 0.0
        self.chains = chain_of(made, True), chain_of(_sparse(made) if sparse else made, False)
        self.computing_s = sum(each.forward_s + each.backward_s for each in made.layers)
        self._before_s = self.computing_s - sum(sum(each.computing_s) for each in self.chains)

    def ends(self, way: str) -> list[list[int]]:
        """Of the batches of either direction."""
        return [_ends(way, chain) for chain in self.chains]

    def seconds(self, ends: Sequence[Sequence[int]], without_startup: bool = False) -> float:
        """Of a step with these batches; the first one's latency, and the last one's, is not hidden."""
        chains = [each._replace(startup_s=0.0) for each in self.chains] if without_startup else self.chains
        latency_s = 0.0 if without_startup else 2 * self._latency_s
        return self._before_s + latency_s + sum(chain.end_s(each) for chain, each in zip(chains, ends, strict=True))


def _ends(way: str, chain: LayerChain) -> list[int]:
    if way == "one message":
        return [len(chain.computing_s)]
    if way == "layer by layer":
        return [*range(1, len(chain.computing_s) + 1)]
    return {"transfers hidden": transfers_hidden, "computing hidden": computing_hidden, "exact": optimum}[way](chain)


def _sparse(made: Workload) -> Workload:
    """With gradients of which only the largest are sent."""
    sizes = tuple(SPARSE.sent_bytes(squarish(each // FLOAT_BYTES)) for each in made.sizes_bytes)
    return replace(made, sizes_bytes=sizes)


def steps(kind: str, network: str, nodes: int, setting: Setting, sparse: bool) -> list[Outcome]:
    """A step in each of the ways."""
    step, found = _Step(network, nodes, setting, sparse), []
    for way in WAYS:
        ends = step.ends(way)
        whole_s, without_s = step.seconds(ends), step.seconds(ends, without_startup=True)
        parts = (whole_s, step.computing_s, whole_s - without_s, without_s - step.computing_s)
        about = kind, network, nodes, *setting, str(SPARSE) if sparse else "dense", way
        found.append(Outcome(*about, *(1e3 * each for each in parts), len(ends[0])))
    return found


def gains(network: str, nodes: int, setting: Setting) -> tuple[float, float]:
    """How many times as fast the exact batches are as one message, and as layer by layer."""
    step = _Step(network, nodes, setting)
    best_s = step.seconds(step.ends("exact"))
    one, each = (step.seconds(step.ends(way)) / best_s for way in PUBLISHED)
    return one, each


def nearest(network: str, nodes: int) -> Outcome:
    """The setting in which both gains together are nearest to what is published, with its exact batches."""
    distances = {}
    for startup_ms, gbit_per_s, rows in itertools.product(STARTUPS_MS, GBITS, ROWS):
        step = _Step(network, nodes, Setting(startup_ms, 0.0, gbit_per_s, rows))
        best_s, *others_s = (step.seconds(step.ends(way)) for way in ("exact", *PUBLISHED))
        for latency_ms in LATENCIES_MS:
            both_s = 2e-3 * latency_ms
            found = [(each_s + both_s) / (best_s + both_s) for each_s in others_s]
            pairs = zip(found, PUBLISHED.values(), strict=True)
            setting = Setting(startup_ms, latency_ms, gbit_per_s, rows)
            distances[setting] = sum(abs(math.log(gain / published)) for gain, published in pairs)
    best = min(distances, key=lambda setting: distances[setting])
    return steps("search", network, nodes, best, sparse=False)[-1]


def report(found: Sequence[Outcome]) -> str:
    """Speed-ups over nodes, the breakdown on the most of them, the algorithms, and what the search has found."""
    most = max(each.nodes for each in found)
    return "\n\n".join((_speedups(found), _breakdown(found, most), _sparsified(found, most), _searched(found, most)))


def _steps_of(found: Sequence[Outcome], kind: str, gradients: str = "dense") -> dict[tuple[str, int, str], Outcome]:
    return {
        (each.network, each.nodes, each.way): each
        for each in found
        if each.kind == kind and each.gradients == gradients
    }


def _speedups(found: Sequence[Outcome]) -> str:
    steps_ = _steps_of(found, "curve")
    sizes = sorted({nodes for _, nodes, _ in steps_})
    rows = []
    for name, way in itertools.product(dict.fromkeys(name for name, *_ in steps_), WAYS):
        of_way = [steps_[name, size, way] for size in sizes]
        rows.append((name, way, *(f"{each.nodes * each.computing_ms / each.step_ms:.1f}" for each in of_way)))
    return f"iBatch: speed-up over nodes; {USUAL}\n\n{text_table(('network', 'way', *map(str, sizes)), rows)}"


def _breakdown(found: Sequence[Outcome], most: int) -> str:
    rows = []
    for kind in ("curve", "found"):
        for (name, nodes, way), each in _steps_of(found, kind).items():
            if nodes == most:
                seconds = (each.step_ms, each.computing_ms, each.startups_ms, each.transfers_ms)
                setting = "usual" if kind == "curve" else "found"
                rows.append((name, setting, way, *(f"{part:.0f}" for part in seconds), str(each.pulls)))
    header = ("network", "setting", "way", "step ms", "computing", "startups", "transfers", "messages of weights")
    return f"On {most} nodes\n\n{text_table(header, rows)}"


def _sparsified(found: Sequence[Outcome], most: int) -> str:
    """Figure 6: gradients sparsified, alone and together with batches."""
    dense, sparse = _steps_of(found, "curve"), _steps_of(found, "curve", str(SPARSE))
    rows = [
        (
            *(name, f"{dense[name, most, WAYS[0]].step_ms:.0f}", f"{sparse[name, most, WAYS[0]].step_ms:.0f}"),
            *(f"{dense[name, most, 'exact'].step_ms:.0f}", f"{sparse[name, most, 'exact'].step_ms:.0f}"),
            f"{sparse[name, most, WAYS[0]].step_ms / sparse[name, most, 'exact'].step_ms:.2f}x",
        )
        for name in dict.fromkeys(name for name, *_ in dense)
    ]
    header = ("network", "one message ms", f"and {SPARSE} ms", "iBatch ms", f"iBatch and {SPARSE} ms", "gain of iBatch")
    return f"Gradients sparsified ({SPARSE}), {most} nodes\n\n{text_table(header, rows)}"


def _searched(found: Sequence[Outcome], most: int) -> str:
    rows = []
    for each in (each for each in found if each.kind == "search"):
        usual, nearest_ = (gains(each.network, most, setting) for setting in (USUAL, each.setting))
        rows.append((each.network, *(f"{gain:.2f}x" for gain in (*usual, *nearest_)), str(each.setting)))
    header = (
        *("network", "over one message, usual", "over layer by layer, usual"),
        *("over one message, found", "over layer by layer, found", "the setting that is found"),
    )
    published = " and ".join(f"{gain:g}x over {way}" for way, gain in PUBLISHED.items())
    return f"The setting nearest to what is published, {published}, on {most} nodes\n\n{text_table(header, rows)}"
