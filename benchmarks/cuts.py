"""Milliseconds of a step of a pipeline between emulated hosts, with what crosses its cuts compressed or not.

Hosts are network namespaces of this machine, each with a worker that has a stage; the program runs on the first of
them. All ways train in one process, in turns of ``--steps`` minibatches, in a sequence that is drawn anew for each
round. Of each the median of all steps is printed but for those of a turn in which the pipeline fills and drains, how
many times as fast as the same scheme without compression that is, and what a minibatch takes by the plan. Needs root,
for the namespaces.

examples:
  python benchmarks/cuts.py
  python benchmarks/cuts.py --scheme spectrain --rate 20 --rate 100 --compression int8 --compression int4 --rounds 10
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.data_parallel import NETWORKS, made
from benchmarks.emulated_hosts import Hosts, emulated
from benchmarks.steal import stolen_part, ticks
from benchmarks.step_times import ends_s
from pipetrain.logs import text_table
from pipetrain.schemes.compression import CUTS, NONE
from pipetrain.schemes.options import splits, with_options

EDGE = 3  # steps of a turn, at either end, that are not counted
ALIKE = ("network", "rows", "rounds", "steps", "microbatches")
REPEATED = ("scheme", "compression")


class Way:
    """One scheme with one compression, and the milliseconds of its steps so far."""

    def __init__(self, options: argparse.Namespace, scheme: str, compression: str, devices: list[str]) -> None:
        import keras

        import pipetrain

        self.scheme, self.compression, self._rows = scheme, compression, options.rows
        model, self._x = made(options.network, options.rows, options.steps)
        how = with_options(scheme, compression=compression)
        pieces = {"microbatches": options.microbatches} if splits(how) else {}
        self._pm = pipetrain.PipelineModel(model, len(devices), how, devices=devices, **pieces)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._pm.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss, jit_compile=False)
        self.steps_ms: list[float] = []
        self.turn(counts=False)
        self.predicted_ms = 1e3 * self._pm.partition(options.rows).step_s

    def turn(self, counts: bool) -> None:
        """Train for a turn, which ``counts`` unless it is to warm up."""
        import numpy as np

        ends = ends_s(self._pm, self._x, np.zeros(len(self._x), "int32"), self._rows, shuffle=False)
        if counts:  # of asynchronous pipelines several results come at once
            within = ends[EDGE:-EDGE]
            self.steps_ms.append(1e3 * (within[-1] - within[0]) / (len(within) - 1))


def train(options: argparse.Namespace) -> None:
    """On the first host: all ways in turns; prints what they took as JSON."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(3)  # workers have as many
    import keras

    import pipetrain

    keras.utils.set_random_seed(0)
    devices = pipetrain.connect(options.addresses)
    pairs = [(scheme, each) for scheme in options.scheme for each in options.compression]
    ways, since, sequences = [Way(options, *pair, devices) for pair in pairs], ticks(), random.Random()
    for _ in range(options.rounds):
        for way in sequences.sample(ways, len(ways)):
            way.turn(counts=True)
    found = [(each.scheme, each.compression, each.steps_ms, each.predicted_ms) for each in ways]
    print(json.dumps([stolen_part(since), found]), flush=True)


def measured(hosts: Hosts, options: argparse.Namespace, rate_mbit: int) -> list[Any]:
    """What all ways take at this bandwidth."""
    hosts.limit(rate_mbit)
    given = [f"--{name}={getattr(options, name)}" for name in ALIKE]
    given += [f"--{name}={value}" for name in REPEATED for value in getattr(options, name)]
    found: list[Any] = hosts.result_of(__file__, *given)
    return found


def table(found: list[Any]) -> str:
    """What the ways took, for people."""
    plain = {scheme: taken_ms for scheme, compression, taken_ms, _ in found if compression == NONE}
    rows = []
    for scheme, compression, taken_ms, predicted_ms in found:
        ratios = [a / b for a, b in zip(plain.get(scheme, ()), taken_ms, strict=False)]
        against = f"{statistics.median(ratios):.2f}x" if ratios else "-"
        ms = statistics.median(taken_ms)
        rows.append((scheme, compression, f"{ms:.0f}", against, f"{predicted_ms:.0f} ({predicted_ms / ms - 1:+.0%})"))
    return text_table(("scheme", "compression", "ms", "against none", "planned ms"), rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="dense", help="(default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--rate", type=int, action="append", metavar="MBIT", help="of each port (default: 20)")
    parser.add_argument("--rows", type=int, default=512, metavar="N", help="of a minibatch (default: 512)")
    parser.add_argument("--microbatches", type=int, default=4, metavar="N", help="of schemes that split (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=16, metavar="N", help=f"of a turn, {2 * EDGE + 2} at least (default: 16)"
    )
    parser.add_argument("--scheme", action="append", metavar="NAME", help="(default: 1f1b and spectrain)")
    names = ", ".join((NONE, *(each.name for each in CUTS)))
    parser.add_argument("--compression", action="append", metavar="NAME", help=f"(default: {names})")
    parser.add_argument("--addresses", nargs="*", help=argparse.SUPPRESS)  # of the workers: on the first host
    options = parser.parse_args()
    options.scheme = options.scheme or ["1f1b", "spectrain"]
    options.compression = options.compression or [NONE, *(each.name for each in CUTS)]
    if options.steps < 2 * EDGE + 2:
        parser.error(
            f"{EDGE} steps at either end of a turn are not counted. Received: --steps {options.steps}. "
            f"Try --steps {2 * EDGE + 2}."
        )
    if options.addresses:
        train(options)
        return
    with emulated(options.hosts) as hosts:
        for rate_mbit in options.rate or [20]:
            stolen, found = measured(hosts, options, rate_mbit)
            of = f"{options.network}, {options.rows} rows, {options.hosts} hosts, {rate_mbit} Mb/s"
            print(f"{of}, {options.rounds} rounds of {options.steps} steps, {stolen:.0%} of the time stolen")
            print(table(found), flush=True)


if __name__ == "__main__":
    main()
