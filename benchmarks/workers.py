"""Samples/s of a 2-stage pipeline on two worker processes, each on a core of its own, against plain Keras on one core.

Both train the same dense network on the same data, in turns: A, B, A, B, ... so that a machine whose speed drifts is
fair to both. The controller, which reads the data, sends them, and computes the metrics, runs on the same two cores as
the workers: its processor time is printed beside theirs. The overhead of an action is what one takes where there is
next to nothing to compute: with 8 units a layer, the time of a step divided by its four actions. Steps are timed from
the fifth result of an epoch to its last; what an epoch takes beside (the data set, the weights' way to the workers and
back, filling and draining the pipeline) is printed by itself.

examples:
  python benchmarks/workers.py
  python benchmarks/workers.py --scheme spectrain --rounds 9
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sides import FIRST
from benchmarks.turns import taking_turns
from pipetrain.cli.environment import start_tensorflow
from pipetrain.logs import text_table
from pipetrain.schemes.table import NAMES

STAGES = 2
SMALL = 8  # units a layer: next to nothing to compute
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Job(NamedTuple):
    """What one process trains: plain Keras where the scheme is None, else a pipeline on two workers."""

    scheme: str | None
    layers: int
    width: int
    batch_size: int
    steps: int

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.scheme}, 2 workers, 2 cores" if self.scheme else "plain Keras, 1 core"


class Round(NamedTuple):
    """Seconds of a ``fit`` beside its steps, of a step, and of these the processor's: its own and workers'."""

    beside_s: float
    step_s: float
    own_s: float
    workers_s: list[float]


def work(job: Job) -> Iterator[Round | None]:
    """One epoch of ``steps`` minibatches a round."""
    if job.scheme is None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        start_tensorflow(1)
        yield from _rounds(job, [], [])
        return
    start_tensorflow(1)
    import pipetrain

    with pipetrain.LocalWorkers(STAGES) as workers:
        devices = pipetrain.connect(workers.addresses)
        yield from _rounds(job, devices, [process.pid for process in workers.processes])


def _rounds(job: Job, devices: list[str], workers: list[int]) -> Iterator[Round | None]:
    import keras
    import numpy as np

    import pipetrain

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(job.width, activation="relu") for _ in range(job.layers)]
    model = keras.Sequential([keras.Input((job.width,)), *layers, keras.layers.Dense(10)])
    settings = {"jit_compile": False}  # with XLA, which Keras would take, it is slower
    if job.scheme:
        cuts = (layers[job.layers // STAGES - 1].name,)
        model = pipetrain.PipelineModel(model, scheme=job.scheme, cuts=cuts, devices=devices)
        settings = {}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss=loss, metrics=["accuracy"], **settings)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(job.steps * job.batch_size, job.width)).astype("float32")
    y = rng.integers(0, 10, len(x)).astype("int32")

    clocks: list[list[float]] = []

    def read() -> None:
        clocks.append([time.perf_counter(), time.process_time(), *map(_processor_s, workers)])

    ends = (FIRST - 1, job.steps - 1)
    timer = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batch in ends and read())
    model.fit(x, y, batch_size=job.batch_size, verbose=0)
    yield None
    while True:
        clocks.clear()
        start_s = time.perf_counter()
        model.fit(x, y, batch_size=job.batch_size, verbose=0, callbacks=[timer])
        fit_s = time.perf_counter() - start_s
        timed = job.steps - FIRST
        step_s, own_s, *others = ((end - start) / timed for start, end in zip(*clocks, strict=True))
        yield Round(fit_s - job.steps * step_s, step_s, own_s, others)


def _processor_s(process: int) -> float:
    """What a process has used of the processors."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", choices=NAMES, default="vanilla", help="(default: vanilla)")
    parser.add_argument("--layers", type=int, default=8, help="dense layers (default: 8)")
    parser.add_argument("--width", type=int, default=1024, help="units of each (default: 1024)")
    parser.add_argument("--batch-size", type=int, default=128, help="(default: 128)")
    parser.add_argument("--steps", type=int, default=100, help="minibatches per round (default: 100)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    options = parser.parse_args()
    if options.steps <= FIRST:
        parser.error(f"--steps must be more than {FIRST}, which fill the pipeline and are not timed")
    size = (options.batch_size, options.steps)
    jobs = [
        Job(None, options.layers, options.width, *size),
        Job(options.scheme, options.layers, options.width, *size),
        Job(options.scheme, options.layers, SMALL, *size),
    ]
    plain, ours, small = taking_turns(work, jobs, options.rounds)
    rows = []
    for job, result in zip(jobs[:2], (plain, ours), strict=True):
        ratios = [theirs.step_s / mine.step_s for theirs, mine in zip(plain, result, strict=True)]
        used = [[1e3 * each.own_s, *(1e3 * one for one in each.workers_s)] for each in result]
        rows.append(
            (
                job.label,
                f"{options.batch_size / statistics.median(each.step_s for each in result):.0f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} - {max(ratios):.2f}",
                " + ".join(f"{statistics.median(column):.1f}" for column in zip(*used, strict=True)),
                f"{1e3 * statistics.median(each.beside_s for each in result):.0f}",
            )
        )
    print(f"{options.layers} x {options.width} dense, batch {options.batch_size}; medians of {options.rounds} rounds")
    print(
        text_table(
            ("", "samples/s", "against plain Keras", "lowest - highest", "processor ms a step", "ms beside"), rows
        )
    )
    overheads_ms = [1e3 * each.step_s / (2 * STAGES) for each in small]
    print(
        f"overhead per action: {statistics.median(overheads_ms):.2f} ms "
        f"({min(overheads_ms):.2f} - {max(overheads_ms):.2f})"
    )


if __name__ == "__main__":
    main()
