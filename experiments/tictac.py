"""TicTac (SysML 2019): orders in which weights are pulled, in ten networks, training and inference, over sizes.

Used by ``ordered_transfers.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from experiments.transfer_networks import TESLA_K80, workload
from pipetrain.logs import text_table
from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.schemes.transfers.orders import ORDERS
from pipetrain.schemes.transfers.plan import Message, pulled_s, pushed_s
from pipetrain.schemes.transfers.tictac import Overlap
from pipetrain.simulation.data_parallel import Setting, simulate_plan
from pipetrain.simulation.profiled import message_of
from pipetrain.trace.idle import overlap

NETWORKS = (
    "alexnet", "googlenet", "inception_v3", "inception_v4", "resnet50", "resnet101", "resnet50_v2", "resnet101_v2",
    "vgg16", "vgg19",
)  # fmt: skip
NODES = (2, 4, 8, 16)
ORDERS_TRIED = ("none", "tic", "tac")
MODES = ("training", "inference")
PUBLISHED = {"training": 1.192, "inference": 1.377}  # at most, of TensorFlow's own order
ROWS = 32
WORKERS_A_SERVER = 4
LINK = Link(10e9 / 8, 5e-4)  # with what a message takes between TensorFlow's processes
RANDOM, DRAWS = "random", 10  # orders, another one on each worker
STEPS = 2  # of which the last is like all that would follow


class Cell(NamedTuple):
    """A network on so many workers, that train or infer."""

    network: str
    mode: str
    nodes: int

    def __str__(self) -> str:
        return f"{self.network}, {self.mode}, {self.nodes} nodes"


class Outcome(NamedTuple):
    """What an order comes to on a worker that is no server, if there is one; see ``Overlap``."""

    network: str
    mode: str
    nodes: int
    order: str
    step_ms: float
    computing_ms: float
    speedup: float
    rho: float
    overlap: float
    efficiency: float
    potential: float
    waiting: float  # of a step: the fastest worker, for the slowest


def cells(networks: Sequence[str], nodes: Sequence[int]) -> list[Cell]:
    """All that is simulated."""
    return [Cell(*each) for each in itertools.product(networks, MODES, nodes)]


def outcomes(cell: Cell) -> list[Outcome]:
    """One network on so many nodes, in each order."""
    cluster, servers = Cluster((Level(LINK),)), max(1, cell.nodes // WORKERS_A_SERVER)
    made = workload(cell.network, TESLA_K80, ROWS, message_of(cluster, cell.nodes, serves=True))
    gradient_bytes = None
    if cell.mode == "inference":  # weights are pulled, and nothing comes back
        layers = tuple(replace(each, backward_s=0.0, update_s=0.0) for each in made.layers)
        made, gradient_bytes = replace(made, layers=layers), (0,) * len(made.sizes_bytes)
    setting = Setting(made, cell.nodes, True, cluster, servers=servers, gradient_bytes=gradient_bytes)
    found = []
    for order in ORDERS_TRIED:
        trace = simulate_plan(setting, ORDERS[order](made, True), STEPS)
        spans = trace.spans
        before_s, end_s = (float(spans.end_s[spans.microbatch == n].max()) for n in range(STEPS))
        each = overlap(trace)[cell.nodes - 1]._replace(step_s=end_s - before_s)
        alone_s = sum(layer.forward_s + layer.backward_s + layer.update_s for layer in made.layers)
        figures = each.rho, each.coefficient, each.efficiency, each.potential
        times_ms = 1e3 * each.step_s, 1e3 * each.computing_s
        found.append(Outcome(*cell, order, *times_ms, cell.nodes * alone_s / each.step_s, *figures, 0.0))
    return [*found, randomly(cell, setting, alone_s)]


def randomly(cell: Cell, setting: Setting, alone_s: float) -> Outcome:
    """Every worker pulls in a random order of its own, and all wait for the slowest; by formulas, means of draws.

    Of servers' ports each worker has its part; what messages take beside their bytes is hidden.
    """
    share = (cell.nodes - 1) / setting.servers
    made = replace(setting.workload, message=Message(0.0, share / LINK.bandwidth_bytes_per_s))
    packs, rng = [made.pack([n]) for n in made.owner], np.random.default_rng(0)
    pushes = ORDERS["none"](made, True).pushes.packs
    pushed = 0.0 if setting.gradient_bytes else pushed_s(made, pushes)
    forward_s, steps_s, waiting = sum(layer.forward_s for layer in made.layers), [], []
    for _ in range(DRAWS):
        orders = [rng.permutation(len(packs)) for _ in range(cell.nodes)]
        each_s = [pulled_s(made, [packs[n] for n in order]) + pushed for order in orders]
        steps_s.append(max(each_s))
        waiting.append(1 - min(each_s) / max(each_s))
    sent_s, step_s = made.message.seconds(sum(made.sizes_bytes)), float(np.mean(steps_s))
    ways_s = sent_s, sent_s if pushed else 0.0
    computing_s = forward_s + sum(layer.backward_s for layer in made.layers)
    each = Overlap(step_s, computing_s, sum(ways_s), *ways_s)
    figures = each.rho, each.coefficient, each.efficiency, each.potential
    speedup = cell.nodes * alone_s / step_s
    return Outcome(*cell, RANDOM, 1e3 * step_s, 1e3 * computing_s, speedup, *figures, float(np.mean(waiting)))


def gains(found: Sequence[Outcome], over: str = "none") -> dict[Cell, float]:
    """How many times as fast TicTac's better order is as none, or as random ones."""
    seconds = {(Cell(*each[:3]), each.order): each.step_ms for each in found}
    return {
        cell: seconds[cell, over] / min(seconds[cell, "tic"], seconds[cell, "tac"])
        for cell in dict.fromkeys(cell for cell, _ in seconds)
    }


def report(found: Sequence[Outcome]) -> str:
    """The gains over sizes, and rho, overlap and efficiency on the most nodes."""
    gained, most = gains(found), max(each.nodes for each in found)
    sizes = sorted({cell.nodes for cell in gained})
    names = [*dict.fromkeys((each.network, each.mode) for each in found)]
    rows = [(*name, *(f"{gained[Cell(*name, size)]:.2f}x" for size in sizes)) for name in names]
    parts = [
        f"TicTac: gain of tic or tac over none, {ROWS} rows a worker on {TESLA_K80.name}\n\n"
        + text_table(("network", "", *(f"{size} nodes" for size in sizes)), rows)
    ]
    speedups = {(Cell(*each[:3]), each.order): each.speedup for each in found}
    rows = [
        (*name, order, *(f"{speedups[Cell(*name, size), order]:.1f}" for size in sizes))
        for name in names
        for order in (*ORDERS_TRIED, RANDOM)
    ]
    header = ("network", "", "order", *(f"{size} nodes" for size in sizes))
    parts.append(f"Speed-up over one worker without transfers\n\n{text_table(header, rows)}")
    rows = [
        (
            *(each.network, each.mode, each.order, f"{each.step_ms:.0f}", f"{each.computing_ms:.0f}"),
            *(f"{each.speedup:.1f}x", *(f"{round(part, 2) + 0.0:.2f}" for part in each[7:10])),
        )
        for each in found
        if each.nodes == most
    ]
    header = ("network", "", "order", "step ms", "computing ms", "speed-up", "rho", "overlap", "efficiency")
    parts.append(f"On {most} nodes\n\n{text_table(header, rows)}")
    waiting = [each.waiting for each in found if each.order == RANDOM]
    for mode, published in PUBLISHED.items():
        ranges = {
            over: [gain for cell, gain in gains(found, over).items() if cell.mode == mode] for over in ("none", RANDOM)
        }
        parts.append(
            f"{mode}: {_range(ranges['none'])} over none, {_range(ranges[RANDOM])} over random orders; published: up "
            f"to {published:g}x of TensorFlow's order"
        )
    parts.append(
        f"The fastest worker waits {100 * min(waiting):.1f}% to {100 * max(waiting):.1f}% of a step for the slowest in "
        "random orders, 0% in an enforced one; published: up to 2.3 times less"
    )
    return "\n\n".join(parts)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}x to {max(values):.2f}x"
