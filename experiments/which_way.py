"""Which way to train wins where: every way predicted for networks, devices and links of several sizes.

Nothing is measured: what a network computes is counted from its shapes, a roofline makes seconds of it for a Tesla P40,
and ``pipetrain.choose`` predicts every way to train. Hosts have four GPUs on PCIe 3.0; between hosts is a network.
Where a GPU has a memory of its own, ways that need more are left out. GPUs that are on one host are planned for once,
whatever the network between hosts.

Rows are kept as they come, in which_way.csv; the picture is which_way.png. It takes about ten minutes on two cores.

examples:
  python experiments/which_way.py
  python experiments/which_way.py --model vgg16 --devices 8 --gbit 10 --table
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import models  # noqa: E402
from experiments.options import writable  # noqa: E402
from experiments.progress import tracked, write_rows  # noqa: E402
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
NAME, PICTURE = "which_way.csv", "which_way.png"
SLICES = 2, 4, 8, 16  # parts of layers' outputs, of which grids on up to 16 devices are made


class Cell(NamedTuple):
    """A network on so many devices, and the network between their hosts: None where all are on one host."""

    model: str
    devices: int
    gbit_per_s: int | None

    def __str__(self) -> str:
        between = f", {self.gbit_per_s} Gb/s" if self.gbit_per_s else ""
        return f"{self.model}, {self.devices} GPUs{between}"


def cluster(gbit_per_s: float | None) -> Cluster:
    """Hosts of four GPUs, joined by such a network; one host without it."""
    host = Level(PCIE_3, ON_HOST)
    between = [Level(Link(gbit_per_s * GBIT, LATENCY_S), contention="port")] if gbit_per_s else []
    return Cluster((host, *between), memory_bytes=MEMORY_BYTES, overhead_s=THREAD_ACTION_S)


def profile_of(name: str) -> Profile:
    """A network's profile on the GPU, with what its layers hand on, by which grids are compared."""
    from pipetrain.compute.graph.blocks import Chain
    from pipetrain.compute.graph.wide_layers import network_of
    from pipetrain.compute.profiling.operation_count import operation_counts

    model = models.build(name, NETWORKS[name], BYTES if name == GPT else CLASSES.get(name, 10))
    profile = roofline(name, BATCH_SIZE, operation_counts(model, BATCH_SIZE), TESLA_P40, SLICES)
    return replace(profile, network=network_of(Chain(model)))


def cells(names: Sequence[str], devices: Sequence[int], gbit_per_s: Sequence[int]) -> list[Cell]:
    """Every network on every cluster."""
    return [
        Cell(model, number, rate)
        for model in names
        for number in devices
        for rate in (gbit_per_s if number > ON_HOST else (None,))
    ]


def row(cell: Cell, exact: Choice, predicted: Choice) -> dict[str, object]:
    """What is taken there of exact ways, and if predicted weights are allowed: a line of the table."""
    one = next(way.step_s for way in exact.ways if way.kind == "single")

    def told(way: Way) -> str:
        return f"{way}, {one / way.step_s:.1f}x"

    others = [way for way in exact.ways if way.fits and way.kind not in (exact.taken.kind, BASELINE)]
    best = min(others, key=lambda way: way.step_s, default=None)
    return {
        "network": cell.model,
        "GPUs": cell.devices,
        "Gb/s": cell.gbit_per_s,
        "taken": told(exact.taken),
        "best of another kind": told(best) if best else "-",
        "taken with predicted weights": told(predicted.taken),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("--model", action="append", choices=NETWORKS, help="several times if wanted (default: all)")
    parser.add_argument("--devices", action="append", type=count, help="GPUs, four a host (default: 4, 8, 64)")
    parser.add_argument("--gbit", action="append", type=count, help="Gb/s between hosts (default: 10, 100)")
    parser.add_argument("--table", action="store_true", help="print all ways of each cell too")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results go (default: runs/which_way)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    options = parse(arguments)
    try:
        output = writable(options.output or ROOT / "runs" / "which_way")
    except ValueError as error:
        print(f"which_way.py: {error}", file=sys.stderr)
        return 2
    start_tensorflow(1)
    wanted = cells(options.model or [*NETWORKS], options.devices or DEVICES, options.gbit or GBIT_PER_S)
    profiles: dict[str, Profile] = {}
    rows: list[dict[str, object]] = []
    for cell in tracked(wanted, [*map(str, wanted)]):
        if cell.model not in profiles:
            profiles[cell.model] = profile_of(cell.model)
        on = profiles[cell.model], cell.devices, cluster(cell.gbit_per_s)
        exact, predicted = (choose(*on, staleness=each) for each in ("none", "predicted"))
        rows.append(row(cell, exact, predicted))
        write_rows(output / NAME, rows)
        if options.table:
            print(f"{cell}\n{predicted}\n")
    lines = [["" if value is None else str(value) for value in each.values()] for each in rows]
    from plots.which_way import draw

    print(f"{text_table([*rows[0]], lines)}\n\n{draw(output / NAME, output / PICTURE)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
