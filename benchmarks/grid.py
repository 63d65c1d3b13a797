"""Milliseconds of a step on grids of emulated hosts, and whether the planner's choice among them is the fastest.

Hosts are network namespaces of this machine, each with a worker on a core of its own or an equal part of the cores, and
a port of limited bandwidth; the program runs on the first of them. By default a wide dense network trains on every grid
of four hosts in turns, ``auto`` among them. With ``--balance`` small dense networks of several widths and minibatches
train on two hosts, by outputs (2, 1) and by rows (1, 2), and what ``pipetrain.plan.balance`` chooses is compared with
which was faster. Needs root, for the namespaces.

How long it takes depends on the steps: for each --rate, every way trains --rounds + 1 turns of three. With the times of
docs/benchmarks/grid.md that is half a minute by default, and with --balance, of 18 cells, seven minutes at 100 Mb/s and
two at 400; starting workers and tracing the functions of every way come before.

examples:
  python benchmarks/grid.py
  python benchmarks/grid.py --width 1024 --rows 512 --rate 100 --rounds 5
  python benchmarks/grid.py --balance --rate 50 --rate 200
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.emulated_hosts import ENVIRONMENT, PORT, ROOT, Hosts, emulated
from benchmarks.step_times import ends_s
from pipetrain.logs import text_table
from pipetrain.plan.balance import LayerShape, break_even_rows, choice
from pipetrain.schemes.options import with_options

if TYPE_CHECKING:
    import numpy as np

STEPS = 3  # of a turn
NARROW, CLASSES = 16, 10
DEPTH = {"grids": 4, "balance": 6}  # layers
WIDTHS, ROWS = (256, 512, 1024), (64, 128, 256, 512, 1024, 2048)  # of --balance
NEAR = 0.2  # from break-even, where either may be the faster one
HOSTS = {"grids": 4, "balance": 2}


class Cell(NamedTuple):
    """A network of so many units in each layer, and the rows of its minibatches."""

    width: int
    rows: int

    @property
    def layer(self) -> LayerShape:
        """One of its layers."""
        return LayerShape.dense("dense", self.width, self.width)


class Way:
    """A network on one grid, and the milliseconds of its steps so far."""

    def __init__(self, cell: Cell, depth: int, grid: Any, devices: list[str]) -> None:
        import keras

        import pipetrain

        keras.utils.set_random_seed(0)
        self.grid, self._rows = grid, cell.rows
        layers = [keras.layers.Dense(cell.width, activation="relu") for _ in range(depth)]
        model = keras.Sequential([keras.Input((NARROW,)), *layers, keras.layers.Dense(CLASSES)])
        self._pm = pipetrain.PipelineModel(model, scheme=with_options("grid", grid=grid), devices=devices)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._pm.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss)
        self._x = self._made()
        self.ms: list[float] = []

    def _made(self) -> np.ndarray:
        import numpy as np

        return np.random.default_rng(0).normal(size=(STEPS * self._rows, NARROW)).astype("float32")

    def turn(self, counts: bool) -> None:
        """Train for a turn, which ``counts`` unless it is to warm up; its first step never does."""
        import numpy as np

        ends = ends_s(self._pm, self._x, np.zeros(len(self._x), "int32"), self._rows, shuffle=False)
        self.ms += [1e3 * each for each in np.diff(ends)] if counts else []

    def told(self) -> dict[str, Any]:
        """What it took, the grid that it had, and what that sends by the formula."""
        from pipetrain.compute.graph.wide_layers import network_of, wide_layers
        from pipetrain.plan.grid_cost import traffic

        strategy = self._pm._strategy
        chain, grid = strategy.planner.chain, strategy.grid
        wide = wide_layers(chain.blocks)
        divided = [piece.wide.name for piece in strategy._weights.pieces if piece.wide]
        sent = traffic(network_of(chain, wide), grid, divided, self._rows).total / grid.devices
        asked = self.grid if isinstance(self.grid, str) else tuple(self.grid)
        return {
            "asked": asked,
            "grid": (grid.outputs, grid.rows),
            "divided": len(divided),
            "sent_bytes": sent,
            "ms": statistics.median(self.ms),
        }


def train(options: argparse.Namespace) -> None:
    """On the first host: every cell and grid in turns; prints what they took as JSON."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(3)  # workers have as many
    import pipetrain

    devices = pipetrain.connect(options.addresses)
    count = len(devices)
    grids: list[Any] = [(n, count // n) for n in range(1, count + 1) if count % n == 0]
    depth = DEPTH["balance" if options.balance else "grids"]
    cells = [Cell(width, rows) for width in WIDTHS for rows in ROWS] if options.balance else [_cell(options)]
    found: list[Any] = []
    for cell in cells:
        print(f"\rcell {len(found) + 1} of {len(cells)}", end="", file=sys.stderr, flush=True)
        ways = [Way(cell, depth, grid, devices) for grid in (grids if options.balance else [*grids, "auto"])]
        for number in range(options.rounds + 1):
            for way in ways:
                way.turn(counts=number > 0)
        found.append((*cell, [way.told() for way in ways]))
    print(file=sys.stderr)
    print(json.dumps(found), flush=True)


def _cell(options: argparse.Namespace) -> Cell:
    return Cell(options.width, options.rows)


def measured(hosts: Hosts, options: argparse.Namespace, rate_mbit: int) -> list[Any]:
    """What all cells take at this bandwidth, in a process of its own on the first host."""
    hosts.limit(rate_mbit)
    given = [f"--{name}={getattr(options, name)}" for name in ("width", "rows", "rounds")]
    given += ["--balance"] if options.balance else []
    addresses = [f"{address}:{PORT}" for address in hosts.addresses]
    command = hosts.on(0, sys.executable, __file__, *given, "--addresses", *addresses)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=ENVIRONMENT)
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def grids_table(ways: list[dict[str, Any]]) -> str:
    """What the grids took, for people."""
    rows = []
    slowest = max(way["ms"] for way in ways)
    for way in ways:
        asked = way["asked"] if isinstance(way["asked"], str) else "x".join(map(str, way["asked"]))
        has = f"{'x'.join(map(str, way['grid']))}, {way['divided']} of {DEPTH['grids'] + 1} layers"
        rows.append((asked, has, f"{way['sent_bytes'] / 1e6:.2f}", f"{way['ms']:.0f}", f"{slowest / way['ms']:.2f}x"))
    return text_table(("grid", "divided", "MB a device", "ms", "against the slowest"), rows)


def balance_table(found: list[Any]) -> tuple[str, int, int]:
    """The choices beside what was faster, how many of them agree, and of how many, those near break-even left out."""
    rows, agree, counted = [], 0, 0
    for width, minibatch, ways in found:
        cell = Cell(width, minibatch)
        ms = {"model" if way["grid"][0] > 1 else "data": way["ms"] for way in ways}
        faster = min(ms, key=lambda kind: ms[kind])
        chosen, even = choice(cell.layer, minibatch, overlap=False), break_even_rows(cell.layer, overlap=False)
        near = abs(minibatch / even - 1) <= NEAR
        agree, counted = agree + (chosen == faster and not near), counted + (not near)
        said = "near break-even" if near else "yes" if chosen == faster else "no"
        rows.append((f"{width}", f"{minibatch}", f"{ms['data']:.1f}", f"{ms['model']:.1f}", chosen, faster, said))
    header = ("units", "rows", "by rows ms", "by outputs ms", "chosen", "faster", "agrees")
    return text_table(header, rows), agree, counted


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, metavar="N", help="units of each dense layer (default: 512)")
    parser.add_argument("--rows", type=int, default=512, metavar="N", help="of a minibatch (default: 512)")
    parser.add_argument("--rate", type=int, action="append", metavar="MBIT", help="of each port (default: 100)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--balance", action="store_true", help="the choice between outputs and rows, cell by cell")
    parser.add_argument("--addresses", nargs="*", help=argparse.SUPPRESS)  # of the workers: on the first host
    options = parser.parse_args()
    if options.addresses:
        train(options)
        return
    agree = counted = 0
    with emulated(HOSTS["balance" if options.balance else "grids"]) as hosts:
        for rate_mbit in options.rate or [100]:
            found = measured(hosts, options, rate_mbit)
            if options.balance:
                table, right, of = balance_table(found)
                agree, counted = agree + right, counted + of
                print(f"{rate_mbit} Mb/s\n{table}", flush=True)
                continue
            ((width, rows, ways),) = found
            print(f"{DEPTH['grids']} layers of {width}, {rows} rows, {len(hosts.names)} hosts, {rate_mbit} Mb/s")
            print(grids_table(ways), flush=True)
    if options.balance:
        print(f"The choice is the faster one in {agree} of {counted} cells.")


if __name__ == "__main__":
    main()
