"""Samples/s that the planner predicts for a 2-stage pipeline on two cores, against those that training then reaches.

Every network trains in a process of its own. The processes take turns: profile, plan, train an epoch; then the next
network. A round's prediction and its measurement so are of the same minute. Schemes that flush the pipeline are
predicted by a simulation, others by the planner.

examples:
  python benchmarks/prediction.py
  python benchmarks/prediction.py --network vgg16 --network dense --rounds 3
  python benchmarks/prediction.py --scheme 1f1b
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

from benchmarks.networks import NETWORKS, Network, build, data
from benchmarks.turns import taking_turns
from pipetrain.cli.quiet import start_tensorflow
from pipetrain.plan.text_table import text_table
from pipetrain.schemes.table import DATA_PARALLEL, NAMES

PIPELINES = [name for name in NAMES if name not in ("single", DATA_PARALLEL)]
FIRST = 10  # minibatches that fill the pipeline and warm up


class Job(NamedTuple):
    """One network under one scheme, so many minibatches a round."""

    network: Network
    scheme: str
    steps: int


class Figures(NamedTuple):
    """One round: samples/s of the plan and of training, between the filling of the pipeline and its drain."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """By what part the plan promises too much."""
        return self.predicted / self.measured - 1


def work(job: Job) -> Iterator[Figures | None]:
    """Profile and train once a round, always with the cut of the first profile."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    start_tensorflow(2)
    import keras

    import pipetrain
    from benchmarks.expected import Expected, microbatches, profiled, training
    from pipetrain.frontend.device_choice import available, described
    from pipetrain.plan.partition import partition

    keras.utils.set_random_seed(0)
    network, devices = job.network, available()
    model = build(network)
    x, y = data(network, job.steps * network.batch_size)
    chosen = partition(profiled(model, network, job.scheme), 2, described(devices), training=training(job.scheme))
    expected = Expected(model, network, {job.scheme: chosen}, devices)
    pipe = pipetrain.PipelineModel(model, chosen, job.scheme, microbatches=microbatches(job.scheme))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    pipe.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss=loss, metrics=["accuracy"])
    times: list[float] = []
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: times.append(time.perf_counter()))
    pipe.fit(x, y, batch_size=network.batch_size, verbose=0)
    yield None
    while True:
        predicted = expected.rates()[job.scheme]
        times.clear()
        pipe.fit(x, y, batch_size=network.batch_size, verbose=0, callbacks=[clock])
        step_s = (times[-1] - times[FIRST - 1]) / (len(times) - FIRST)
        yield Figures(predicted, network.batch_size / step_s)


def row(name: str, rounds: list[Figures]) -> tuple[str, ...]:
    """A network's line of the table."""
    errors = [each.error for each in rounds]
    predicted, measured = (statistics.median(each) for each in zip(*rounds, strict=True))
    middle = statistics.median(errors)
    return name, f"{predicted:.0f}", f"{measured:.0f}", f"{middle:+.1%}", f"{min(errors):+.0%} to {max(errors):+.0%}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=NETWORKS, help="(default: all)")
    parser.add_argument("--scheme", choices=PIPELINES, default="spectrain", help="(default: spectrain)")
    parser.add_argument("--steps", type=int, default=50, help="minibatches a round (default: 50)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    options = parser.parse_args()
    if options.steps <= FIRST:
        parser.error(f"--steps must be more than {FIRST}")
    names = options.network or [*NETWORKS]
    results = taking_turns(work, [Job(NETWORKS[name], options.scheme, options.steps) for name in names], options.rounds)
    print(f"2 stages on two cores, {options.scheme}; medians of {options.rounds} rounds")
    rows = [row(name, rounds) for name, rounds in zip(names, results, strict=True)]
    print(text_table(("", "predicted samples/s", "measured", "error", "rounds"), rows))
    errors = [abs(statistics.median(each.error for each in rounds)) for rounds in results]
    print(f"median error: {statistics.median(errors):.1%}; largest: {max(errors):.1%}")


if __name__ == "__main__":
    main()
