"""Samples/s of a 2-stage pipeline on two cores, against plain Keras on one core.

Both train the same dense network on the same data. Each side lives in a process of its own, the plain one pinned
to one core, the pipeline to two, and only one of them works at a time: A, B, A, B, ... so that a machine whose
speed drifts is fair to both. The bound is 2.0x.

examples:
  python benchmarks/throughput.py
  python benchmarks/throughput.py --scheme vanilla --scheme 1f1b --layers 8 --width 1024
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

from benchmarks.turns import taking_turns
from pipetrain.plan.schemes import NAMES
from pipetrain.plan.table import table
from pipetrain.run.quiet import start_tensorflow


class Job(NamedTuple):
    """What one process trains: plain Keras where the scheme is None, on ``cores`` cores."""

    scheme: str | None
    layers: int
    width: int
    batch_size: int
    steps: int
    jit: bool
    cores: int

    @property
    def label(self) -> str:
        """For people."""
        if self.scheme is None:
            return f"plain Keras, 1 core{', XLA' if self.jit else ''}"
        return f"{self.scheme}, 2 stages, 2 cores"


def work(job: Job) -> Iterator[float | None]:
    """Samples/s of one epoch of ``steps`` minibatches a round."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.cores])
    start_tensorflow(job.cores)
    import keras
    import numpy as np

    import pipetrain

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(job.width, activation="relu") for _ in range(job.layers)]
    model = keras.Sequential([keras.Input((job.width,)), *layers, keras.layers.Dense(10)])
    settings = {"jit_compile": job.jit}
    if job.scheme:
        cuts = (layers[job.layers // 2 - 1].name,)
        model = pipetrain.PipelineModel(model, scheme=job.scheme, cuts=cuts)
        settings = {}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss=loss, metrics=["accuracy"], **settings)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(job.steps * job.batch_size, job.width)).astype("float32")
    y = rng.integers(0, 10, len(x)).astype("int32")

    clock: dict[str, float] = {}
    timer = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: clock.update(start=time.perf_counter()),
        on_epoch_end=lambda epoch, logs: clock.update(end=time.perf_counter()),  # after the drain
    )

    model.fit(x, y, batch_size=job.batch_size, verbose=0)
    yield None
    while True:
        model.fit(x, y, batch_size=job.batch_size, verbose=0, callbacks=[timer])
        yield len(x) / (clock["end"] - clock["start"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", action="append", choices=NAMES, help="(default: spectrain and vanilla)")
    parser.add_argument("--layers", type=int, default=8, help="dense layers (default: 8)")
    parser.add_argument("--width", type=int, default=1024, help="units of each (default: 1024)")
    parser.add_argument("--batch-size", type=int, default=128, help="(default: 128)")
    parser.add_argument("--steps", type=int, default=100, help="minibatches per round (default: 100)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    options = parser.parse_args()
    size = (options.layers, options.width, options.batch_size, options.steps)
    schemes = options.scheme or ["spectrain", "vanilla"]
    jobs = [Job(None, *size, jit, 1) for jit in (False, True)] + [Job(scheme, *size, False, 2) for scheme in schemes]
    results = taking_turns(work, jobs, options.rounds)
    # Keras compiles with XLA by default; whichever plain Keras is faster is the one to beat.
    best = max(results[:2], key=statistics.median)
    rows = []
    for job, result in zip(jobs, results, strict=True):
        ratios = [ours / plain for ours, plain in zip(result, best, strict=True)]
        rows.append(
            (
                job.label,
                f"{statistics.median(result):.0f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} - {max(ratios):.2f}",
            )
        )
    print(f"{options.layers} x {options.width} dense, batch {options.batch_size}; medians of {options.rounds} rounds")
    print(table(("", "samples/s", "against plain Keras", "lowest - highest"), rows))


if __name__ == "__main__":
    main()
