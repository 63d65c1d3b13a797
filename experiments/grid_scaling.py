"""How a dense network scales with processes: rows divided (batch), outputs divided (model), or both (integrated).

After Figures 5 to 7 of "Integrated Model and Batch Parallelism" (Berkeley, 2018), which measures what Gholami et al.
(arXiv 1712.04432) count: widths of 32 to 1,024 units, 1 to 32 processes, 100 rows a process. A speed-up is how many
times the rows a second of one process. Layers and machine of the source are not known to us: four layers, and processes
of one core each as this repository's machine has them (constants below), whose products are counted by a roofline.

Two ways to send are simulated:
  equation-8   the source's: in steps of log2(P) messages, nothing beside computing, gradients of inputs summed on all
  pipetrain    as the scheme "grid" does: message by message, beside computing; each process gets its own sums

With --measure grids of 2 to 6 processes train on this machine and are set beside what the simulation predicts from the
measured profile, its slices, the measured link, and what messages take. Where processes are more than cores they share
them, and where other programs run, both vary.

The sweep takes about 15 s, --measure about six minutes; every cell is kept as soon as it is known.

examples:
  python experiments/grid_scaling.py
  python experiments/grid_scaling.py --bandwidth 10Gb/s --depth 8
  python experiments/grid_scaling.py --measure
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.options import writable  # noqa: E402
from experiments.progress import tracked, write_rows  # noqa: E402
from experiments.published import verdict  # noqa: E402
from pipetrain.cli.arguments import Folded, count  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402
from pipetrain.plan.cluster import Cluster, Level, Link, bandwidth_bytes_per_s  # noqa: E402
from pipetrain.plan.grid_cost import PUBLISHED, GridNetwork, layer_seconds  # noqa: E402
from pipetrain.plan.profile import Profile  # noqa: E402
from pipetrain.plan.roofline import Device, Product, Work, roofline  # noqa: E402
from pipetrain.schemes.grid import Grid  # noqa: E402
from pipetrain.schemes.transfers.plan import Message  # noqa: E402
from pipetrain.simulation.grid import simulate_grid  # noqa: E402

WIDTHS, PROCESSES, ROWS, DEPTH = (32, 64, 128, 256, 512, 1024), (1, 2, 4, 8, 16, 32), 100, 4
MEASURED_WIDTHS, MEASURED_PROCESSES = (64, 256, 1024), (2, 3, 4, 6)
# One core with AVX-512: products of 200 GFLOP/s, 16 GB/s, and 13 us for an operation of TensorFlow's, measured.
CORE = Device("a core", 220e9, 20e9, 1, tile=16, launch_s=13e-6)
BANDWIDTH, LATENCY_S = "3Gb/s", 2e-4  # with which batch is 5.8; between processes here 0.2 to 1 GB/s were measured
MESSAGE_WORK = Message(2e-4)  # of either end's processor
PIECE_S = 6e-5  # of a block's forward or backward in the step's function, measured on logical devices
WAYS = ("batch", "model", "integrated")
SENDING = ("equation-8", "pipetrain")
PAPER = {"batch": 5.8, "model": 1.2}  # at 32 processes, width 1,024
PAPER_INTEGRATED = 0.99  # of batch


class Cell(NamedTuple):
    """A network of so many units in each layer on so many processes."""

    width: int
    processes: int


class Outcome(NamedTuple):
    """A cell trained one way: its grid, the seconds of a step, and rows a second over those of one process."""

    sending: str
    width: int
    processes: int
    way: str
    outputs: int
    rows: int
    step_s: float
    speedup: float


def profile_of(width: int, rows: int, depth: int, slices: Sequence[int]) -> Profile:
    """So many dense layers with ReLU on a core, by the roofline."""
    network = GridNetwork.chain((width,) * (depth + 1))
    product = Product(rows, width, width, 4 * (2 * rows * width + width * width))
    size = 4 * rows * width  # bias and activation read and write as much
    works = [Work(each.name, (product,), 4 * size, 2, 4 * each.weights, size, 2 * size) for each in network.layers]
    return replace(roofline("dense", rows, works, CORE, slices), network=network)


def grids(processes: int) -> list[Grid]:
    """All of so many processes."""
    return [Grid(outputs, processes // outputs) for outputs in range(1, processes + 1) if processes % outputs == 0]


def way_of(grid: Grid) -> str:
    """What it is called."""
    return "batch" if grid.outputs == 1 else "model" if grid.rows == 1 else "integrated"


def equation_8_s(profile: Profile, grid: Grid, link: Link) -> float:
    """A step whose messages are those of Equation 8 as published, none of them beside computing."""
    assert profile.network is not None
    sent_s = sum(
        layer_seconds(layer, grid, profile.batch_size, link, PUBLISHED, is_first=n == 0)
        for n, layer in enumerate(profile.network.layers)
        if grid.devices > 1
    )
    each = [block.slice_s(grid.outputs) for block in profile.trained]
    updates_s = sum(block.update_s for block in profile.trained) / grid.outputs
    return sent_s + sum(map(sum, each)) / grid.rows + updates_s + 2 * len(each) * PIECE_S


def simulated(cell: Cell, options: argparse.Namespace) -> list[Outcome]:
    """Every way to divide one network, the fastest of those that divide both standing for them."""
    width, processes = cell
    link = Link(bandwidth_bytes_per_s(options.bandwidth), options.latency_us * 1e-6)
    cluster = Cluster((Level(link, contention="port"),), message_work=MESSAGE_WORK)
    slices = [parts for parts in (2, 4, 8, 16, 32) if parts <= min(processes, width)]
    profile = profile_of(width, options.rows * processes, options.depth, slices)
    alone = simulate_grid(profile_of(width, options.rows, options.depth, ()), 1, cluster, piece_s=PIECE_S).step_s
    found: list[Outcome] = []
    for sending in SENDING:
        best: dict[str, Outcome] = {}
        for grid in grids(processes):
            if sending == "pipetrain":
                trace = simulate_grid(profile, processes, cluster, grid, piece_s=PIECE_S)
                step_s = trace.step_s
            else:
                step_s = equation_8_s(profile, grid, link)
            speedup = processes * alone / step_s
            each = Outcome(sending, width, processes, way_of(grid), grid.outputs, grid.rows, step_s, speedup)
            if each.way not in best or best[each.way].step_s > step_s:
                best[each.way] = each
        found += best.values()
    return found


def report(outcomes: Sequence[Outcome]) -> str:
    """Speed-ups by width at the most processes, by processes at the largest width, and beside the source."""
    most, widest = max(each.processes for each in outcomes), max(each.width for each in outcomes)
    by = {(each.sending, each.width, each.processes, each.way): each for each in outcomes}
    parts = []
    for sending in SENDING:
        rows = [
            (str(width), *(_told(by.get((sending, width, most, way))) for way in WAYS))
            for width in dict.fromkeys(each.width for each in outcomes)
        ]
        parts.append(f"{sending}: speed-up on {most} processes\n\n{text_table(('width', *WAYS), rows)}")
        rows = [
            (str(processes), *(_told(by.get((sending, widest, processes, way))) for way in WAYS))
            for processes in dict.fromkeys(each.processes for each in outcomes)
        ]
        parts.append(f"{sending}: speed-up at width {widest}\n\n{text_table(('processes', *WAYS), rows)}")
    return "\n\n".join([*parts, f"Beside the source\n\n{compared(outcomes)}"])


def _told(each: Outcome | None) -> str:
    if each is None:
        return "-"
    return f"{each.speedup:.2f}x" + (f" ({each.outputs}x{each.rows})" if each.way == "integrated" else "")


def compared(outcomes: Sequence[Outcome]) -> str:
    """The source's numbers beside ours, and whether they agree within 25%."""
    rows = []
    for way, paper in [*PAPER.items(), ("integrated, of batch", PAPER_INTEGRATED)]:
        ours = [number_of(outcomes, sending, way) for sending in SENDING]
        rows.append((way, f"{paper:g}", *(_beside(each, paper) for each in ours)))
    return text_table(("speed-up", "source", *SENDING), rows)


def _beside(ours: float | None, paper: float) -> str:
    if ours is None:
        return "-"
    return f"{ours:.2f} {verdict(ours, paper)}"


def number_of(outcomes: Sequence[Outcome], sending: str, way: str) -> float | None:
    """A number as the source has it, at 32 processes and width 1,024; None where that was not simulated."""
    by = {
        each.way: each.speedup
        for each in outcomes
        if (each.sending, each.width, each.processes) == (sending, WIDTHS[-1], PROCESSES[-1])
    }
    if way in PAPER:
        return by.get(way)
    return by["integrated"] / by["batch"] if {"integrated", "batch"} <= {*by} else None


class Measurement(NamedTuple):
    """A grid of processes, what a step took (the median) and what it is simulated to take."""

    processes: int
    width: int
    outputs: int
    rows: int
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """How much longer than measured it is simulated to take."""
        return self.simulated_s / self.measured_s - 1


def measure(processes: int, widths: Sequence[int], options: argparse.Namespace) -> Iterator[Measurement]:
    """Train grids of so many processes; this process is the one that connects to them."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(3)  # workers have as many: one computes, others send
    tf.config.threading.set_intra_op_parallelism_threads(1)
    import pipetrain
    from pipetrain.cluster.bandwidth import with_processors
    from pipetrain.compute.profiling.profiler import with_slices
    from pipetrain.frontend.layout import described

    with pipetrain.LocalWorkers(processes) as workers:
        devices = pipetrain.connect(workers.addresses)
        cluster = with_processors(described(devices, within_functions=True), devices)
        cluster = replace(cluster, caller_work_s=())  # which is in what a step takes beside
        beside_s = _beside_s(processes, cluster, devices)
        for width in widths:
            parts = {grid.outputs for grid in grids(processes)}
            model = _model(width, options.depth)
            profile = pipetrain.profile(model, options.rows * processes, verbose=False)
            profile = with_slices(profile, model, sorted(parts))
            for grid in grids(processes):
                measured_s = _step_s(width, options.depth, options.rows, grid, devices, 20)
                trace = simulate_grid(profile, processes, cluster, grid, piece_s=PIECE_S)
                yield Measurement(processes, width, grid.outputs, grid.rows, measured_s, beside_s + trace.step_s)


def _beside_s(processes: int, cluster: Cluster, devices: Sequence[str]) -> float:
    """What a step takes that is not simulated: of a layer of 8 units, which computes next to nothing."""
    import pipetrain

    grid = Grid(1, processes)
    profile = pipetrain.profile(_model(8, 1), processes, verbose=False)
    simulated_s = simulate_grid(profile, processes, cluster, grid, piece_s=PIECE_S).step_s
    return max(0.0, _step_s(8, 1, 1, grid, devices, 30) - simulated_s)


def _model(width: int, depth: int) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    return keras.Sequential([keras.Input((width,)), *layers])


def _step_s(width: int, depth: int, rows_each: int, grid: Grid, devices: Sequence[str], steps: int) -> float:
    """The median of the steps of a fit, without the first five."""
    import keras
    import numpy as np

    import pipetrain

    model = pipetrain.PipelineModel(_model(width, depth), scheme=Grid(grid.outputs, grid.rows), devices=devices)
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse")
    rows = rows_each * grid.devices
    x = np.random.default_rng(0).normal(size=(rows * steps, width)).astype("float32")
    ends: list[float] = []
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    model.fit(x, x, batch_size=rows, verbose=0, shuffle=False, callbacks=[clock])
    return float(np.median(np.diff(ends)[4:]))


def measured_apart(processes: int, options: argparse.Namespace) -> list[Measurement]:
    """The same in a process of its own, which has TensorFlow's threads as it needs them."""
    given = ["--depth", str(options.depth), "--rows", str(options.rows), "--on", str(processes)]
    given += [part for width in options.width or MEASURED_WIDTHS for part in ("--width", str(width))]
    done = subprocess.run(
        [sys.executable, __file__, *given], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"Processes did not train. Received: {processes} processes. Try --on {processes} to see why.")
    return [Measurement(*each) for each in json.loads(done.stdout.splitlines()[-1])]


def measured_table(found: Sequence[Measurement]) -> str:
    """What grids took beside what they are simulated to take."""
    rows = [
        (
            *(str(each.processes), str(each.width), f"{each.outputs}x{each.rows}"),
            *(f"{1e3 * each.measured_s:.1f}", f"{1e3 * each.simulated_s:.1f}", f"{each.error:+.0%}"),
        )
        for each in found
    ]
    median = statistics.median(abs(each.error) for each in found)
    table = text_table(("processes", "width", "grid", "measured ms", "simulated ms", "error"), rows)
    return f"{table}\n\nMedian error of {len(found)} grids: {median:.0%}."


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    add = parser.add_argument
    add("--width", action="append", type=count, metavar="N", help="units of each layer; several times (32 to 1024)")
    add("--processes", action="append", type=count, metavar="N", help="several times (default: 1 to 32; 2 to 6)")
    add("--depth", type=count, default=DEPTH, metavar="N", help="layers (default: 4)")
    add("--rows", type=count, default=ROWS, metavar="N", help="of each process (default: 100)")
    add("--bandwidth", default=BANDWIDTH, metavar="X", help="of each process, such as 10Gb/s (default: %(default)s)")
    add("--latency-us", type=float, default=1e6 * LATENCY_S, metavar="X", help="of a message (default: 200)")
    add("--measure", action="store_true", help="train grids of 2 to 6 processes here, beside their simulation")
    add("--on", type=count, help=argparse.SUPPRESS)  # so many processes, as the process that connects to them
    add("--output", type=Path, metavar="DIR", help="where results go (default: runs/grid_scaling)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    options = parse(arguments)
    if options.on:
        print(json.dumps([*measure(options.on, options.width or MEASURED_WIDTHS, options)]))
        return 0
    try:
        output = writable(options.output or ROOT / "runs" / "grid_scaling")
        print(measured_all(options, output) if options.measure else swept(options, output))
    except ValueError as error:
        print(f"grid_scaling.py: {error}", file=sys.stderr)
        return 2
    return 0


def swept(options: argparse.Namespace, output: Path) -> str:
    """Simulate all cells, draw them, and say what came out."""
    wanted = [Cell(w, p) for w in options.width or WIDTHS for p in options.processes or PROCESSES]
    found: list[Outcome] = []
    for cell in tracked(wanted, [f"width {each.width}, {each.processes} processes" for each in wanted]):
        found += simulated(cell, options)
        path = write_rows(output / "grid_scaling.csv", [each._asdict() for each in found])
    from plots.grid_scaling import draw

    return f"{report(found)}\n\n{draw(path, output / 'grid_scaling.png')}"


def measured_all(options: argparse.Namespace, output: Path) -> str:
    """Measure all grids, and say how near the simulation comes."""
    wanted = options.processes or MEASURED_PROCESSES
    found: list[Measurement] = []
    for processes in tracked(wanted, [f"{each} processes" for each in wanted]):
        found += measured_apart(processes, options)
        write_rows(output / "grid_measured.csv", [{**each._asdict(), "error": each.error} for each in found])
    return measured_table(found)


if __name__ == "__main__":
    sys.exit(main())
