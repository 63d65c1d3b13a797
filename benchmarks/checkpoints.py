"""What checkpoints cost: steps of a training with them beside steps of the same training without.

Here two cores train a network with ``PipelineCheckpoint(every_steps="auto")``. With ``--rate`` two hosts train it,
which are network namespaces of this machine with a port of limited bandwidth each (needs root): there state goes to the
memory of both hosts (``replicate``) and checkpoints on the disk are few. The sides train
in turns of ``--seconds``, in a sequence that is drawn anew for each round. A ratio is the median over rounds of the
seconds of a step without checkpoints over those with them, with its quartiles. What counts is the time from
the end of a turn's first checkpoint to the end of its last one, so that every checkpoint has the whole interval that it
is made for; a turn with fewer than two counts from its first step's end to its last one's.

examples:
  python benchmarks/checkpoints.py
  python benchmarks/checkpoints.py --network vgg16 --scheme spectrain --rounds 20
  python benchmarks/checkpoints.py --rate 1000 --network dense
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import data_parallel, networks
from benchmarks.emulated_hosts import emulated
from benchmarks.quartiles import quartiles
from benchmarks.steal import stolen_part, ticks
from pipetrain.logs import text_table

if TYPE_CHECKING:
    import keras
    import numpy as np

SCHEMES = ("spectrain", "1f1b", "all-reduce")
WARM_UP = 6  # steps of a side's first turn
TIMED = 60  # of its second one, whose mean says how many steps a turn has: several may end with one call
DISK_STEPS = 10_000  # from one checkpoint to the next on the disk, where memory has the state of every call


def made(options: argparse.Namespace) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """A network, and one minibatch for it."""
    import numpy as np

    if options.addresses:
        model, x = data_parallel.made(options.network, options.rows or 4096, 1)
        return model, x, np.zeros(len(x), "int32")
    network = networks.NETWORKS[options.network]
    return networks.build(network), *networks.data(network, options.rows or network.batch_size)


class Training:
    """One scheme, trained without checkpoints and with them by turns."""

    def __init__(self, options: argparse.Namespace, scheme: str, devices: Sequence[str], folder: Path) -> None:
        import keras

        import pipetrain

        model, *minibatch = made(options)
        cut = {} if scheme == "all-reduce" else {"stages": len(devices)}
        self._pm = pipetrain.PipelineModel(model, scheme=scheme, devices=devices, **cut)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._pm.compile(keras.optimizers.Adam(1e-5), loss)
        self._minibatch, self._folder, self.scheme = minibatch, folder, scheme
        self._replicates = options.replicate if options.addresses else None
        self._seconds = options.seconds
        self.steps = 0
        self.step_s: dict[bool, list[float]] = {False: [], True: []}
        self.checkpoints: list[int] = []  # of each turn

    def warm_up(self) -> None:
        """Find how many steps a turn has."""
        self._ends(WARM_UP)
        ends, _ = self._ends(TIMED)
        self.steps = max(2 * WARM_UP, round(self._seconds * (TIMED - 1) / (ends[-1] - ends[0])))

    def turn(self, with_checkpoints: bool) -> None:
        """Train for a turn."""
        ends, saved = self._ends(self.steps, with_checkpoints)
        whole = [*saved.values()] if len(saved) > 1 else [0, len(ends) - 1]
        taken_s = ends[whole[-1]] - ends[whole[0]]
        self.step_s[with_checkpoints].append(taken_s / (whole[-1] - whole[0]))
        self.checkpoints += [len(saved)] if with_checkpoints else []

    def _ends(self, steps: int, with_checkpoints: bool = False) -> tuple[list[float], dict[int, int]]:
        """Train; when steps ended, and of each checkpoint that is there, after how many of these steps it was."""
        import keras
        import tensorflow as tf

        from pipetrain.callbacks import PipelineCheckpoint

        ends: list[float] = []
        saved: dict[int, int] = {}
        callbacks: list[Any] = []
        if with_checkpoints:
            how: dict[str, Any] = {"every_steps": "auto"}
            if self._replicates:
                how = {"every_steps": DISK_STEPS, "replicate": self._replicates}
            callbacks.append(PipelineCheckpoint(self._folder, **how))

        def ended(step: int, logs: Any) -> None:
            ends.append(time.perf_counter())
            for each in callbacks[:-1]:
                if each.saved_at is not None:
                    saved.setdefault(each.saved_at, len(ends) - 1)

        callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=ended))
        rows = tf.data.Dataset.from_tensors(tuple(self._minibatch)).repeat(steps)
        self._pm.fit(rows, verbose=0, callbacks=callbacks)
        shutil.rmtree(self._folder, ignore_errors=True)
        return ends, saved

    def row(self) -> tuple[str, ...]:
        """Of the table."""
        without, beside = self.step_s[False], self.step_s[True]
        low, middle, high = quartiles([a / b for a, b in zip(without, beside, strict=True)])
        made = self._replicates or f"{statistics.median(self.checkpoints):g}"
        ms = (f"{1e3 * statistics.median(each):.2f}" for each in (without, beside))
        return self.scheme, str(self.steps), made, *ms, f"{middle:.3f} ({low:.3f} - {high:.3f})"


def train(options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Train every scheme with and without checkpoints by turns; the rows of the table."""
    import keras

    import pipetrain

    keras.utils.set_random_seed(0)
    if options.addresses:
        devices = pipetrain.connect(options.addresses)
    else:
        pipetrain.set_cpu_devices(2)
        devices = ["CPU:0", "CPU:1"]
    sequences, rows = random.Random(), []
    with TemporaryDirectory() as folder:
        for scheme in options.scheme or SCHEMES:
            training = Training(options, scheme, devices, Path(folder) / "checkpoints")
            training.warm_up()
            for number in range(options.rounds):
                for with_checkpoints in sequences.sample((False, True), 2):
                    training.turn(with_checkpoints)
                print(f"\r{scheme}: round {number + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            rows.append(training.row())
    return rows


def of_hosts(options: argparse.Namespace, arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """The same between emulated hosts, on the first of which the program runs."""
    with emulated(2) as hosts:
        hosts.limit(options.rate)
        return [tuple(row) for row in hosts.result_of(__file__, *arguments)]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--network", default="dense", help="here one of benchmarks/networks.py; between hosts of data_parallel.py"
    )
    parser.add_argument("--scheme", action="append", help=f"(default: {', '.join(SCHEMES)})")
    parser.add_argument("--rate", type=int, metavar="MBIT", help="of each of two hosts' ports (default: no hosts)")
    parser.add_argument(
        "--replicate", default="memory:auto", metavar="HOW", help="between hosts (default: memory:auto)"
    )
    parser.add_argument("--rows", type=int, metavar="N", help="of a minibatch (default: the network's; 4096)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="of a turn (default: 30)")
    parser.add_argument("--addresses", nargs="*", help=argparse.SUPPRESS)  # of the workers: on the first host
    options = parser.parse_args(given)
    if options.addresses:
        print(json.dumps(train(options)), flush=True)
        return
    since = ticks()
    rows = of_hosts(options, given) if options.rate else train(options)
    head = ("scheme", "steps a turn", "checkpoints in it", "ms a step without", "with", "speed with, of without")
    where = f"two hosts, {options.rate} Mb/s" if options.rate else "two cores"
    print(f"{options.network}, {where}, {options.rounds} rounds, {stolen_part(since):.0%} of the time stolen")
    print(text_table(head, rows))


if __name__ == "__main__":
    main()
