"""Which way to train wins where: every way predicted for networks, devices and links of several sizes.

Nothing is measured: what a network computes is counted from its shapes, a roofline makes seconds of it for a Tesla P40,
and ``pipetrain.choose`` predicts every way to train. Hosts have four GPUs on PCIe 3.0; between hosts is a network.
Where a GPU has a memory of its own, ways that need more are left out.

examples:
  python experiments/which_way.py
  python experiments/which_way.py --model vgg16 --devices 8 --gbit 10 --table
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import models  # noqa: E402
from experiments.traffic import CLASSES, INPUTS  # noqa: E402
from pipetrain.cli.arguments import Folded, count  # noqa: E402
from pipetrain.cli.environment import start_tensorflow  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402
from pipetrain.plan.choice import BASELINE, Choice, Way  # noqa: E402
from pipetrain.plan.cluster import PCIE_3, Cluster, Level, Link  # noqa: E402
from pipetrain.plan.profile import Profile  # noqa: E402
from pipetrain.plan.roofline import TESLA_P40, roofline  # noqa: E402
from pipetrain.simulation.costs import THREAD_ACTION_S  # noqa: E402
from pipetrain.simulation.every_way import choose  # noqa: E402

ON_HOST, DEVICES, GBIT_PER_S = 4, (4, 8, 64), (10, 100)
GPT, TEXT, BYTES = "gpt2", (128,), 256  # GPT-2 of 12 blocks of 768 units, which reads texts byte by byte
NETWORKS = {**INPUTS, GPT: TEXT}
LATENCY_S, GBIT, MEMORY_BYTES = 50e-6, 1e9 / 8, 24 * 2**30
BATCH_SIZE = 512
SLICES = 2, 4, 8, 16  # parts of layers' outputs, of which grids on up to 16 devices are made


class Cell(NamedTuple):
    """What is taken for one network on so many devices: of exact ways, and if predicted weights are allowed."""

    model: str
    devices: int
    gbit_per_s: int
    exact: Choice
    predicted: Choice
    planning_s: float


def cluster(gbit_per_s: float) -> Cluster:
    """Hosts of four GPUs, joined by such a network."""
    levels = Level(PCIE_3, ON_HOST), Level(Link(gbit_per_s * GBIT, LATENCY_S), contention="port")
    return Cluster(levels, memory_bytes=MEMORY_BYTES, overhead_s=THREAD_ACTION_S)


def profile_of(name: str) -> Profile:
    """A network's profile on the GPU, with what its layers hand on, by which grids are compared."""
    from pipetrain.compute.graph.blocks import Chain
    from pipetrain.compute.graph.wide_layers import network_of
    from pipetrain.compute.profiling.operation_count import operation_counts

    model = models.build(name, NETWORKS[name], BYTES if name == GPT else CLASSES.get(name, 10))
    profile = roofline(name, BATCH_SIZE, operation_counts(model, BATCH_SIZE), TESLA_P40, SLICES)
    return replace(profile, network=network_of(Chain(model)))


def cells(names: Sequence[str], devices: Sequence[int], gbit_per_s: Sequence[int]) -> Iterator[Cell]:
    """Every network on every cluster."""
    for model in names:
        profile = profile_of(model)
        for number in devices:
            for rate in gbit_per_s:
                begun = time.perf_counter()
                exact, predicted = (choose(profile, number, cluster(rate), staleness=s) for s in ("none", "predicted"))
                yield Cell(model, number, rate, exact, predicted, (time.perf_counter() - begun) / 2)


def row(cell: Cell) -> tuple[str, ...]:
    """A cell as a line of the table."""
    one = next(way.step_s for way in cell.exact.ways if way.kind == "single")

    def told(way: Way) -> str:
        return f"{way}, {one / way.step_s:.1f}x"

    others = [way for way in cell.exact.ways if way.fits and way.kind not in (cell.exact.taken.kind, BASELINE)]
    best = min(others, key=lambda way: way.step_s) if others else None
    where = cell.model, str(cell.devices), str(cell.gbit_per_s)
    return *where, told(cell.exact.taken), told(best) if best else "-", told(cell.predicted.taken)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("--model", action="append", choices=NETWORKS, help="several times if wanted (default: all)")
    parser.add_argument("--devices", action="append", type=count, help="GPUs, four a host (default: 4, 8, 64)")
    parser.add_argument("--gbit", action="append", type=count, help="Gb/s between hosts (default: 10, 100)")
    parser.add_argument("--table", action="store_true", help="print all ways of each cell too")
    options = parser.parse_args(arguments)
    start_tensorflow(1)
    found = []
    for cell in cells(options.model or [*NETWORKS], options.devices or DEVICES, options.gbit or GBIT_PER_S):
        found.append(cell)
        print(f"{cell.model}, {cell.devices} devices, {cell.gbit_per_s} Gb/s: {cell.planning_s:.1f} s", file=sys.stderr)
        if options.table:
            print(f"{cell.model}, {cell.devices} devices, {cell.gbit_per_s} Gb/s\n{cell.predicted}\n")
    header = ("network", "GPUs", "Gb/s", "taken", "best of another kind", "taken with predicted weights")
    print(text_table(header, [row(cell) for cell in found]))


if __name__ == "__main__":
    main()
