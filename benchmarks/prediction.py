"""Samples/s predicted for 2-stage pipelines on two cores, against those that training then reaches.

Every network trains in a process of its own. The processes take turns: profile, plan, train an epoch under each scheme;
then the next network. A round's predictions and its measurements so are of the same minute. Synchronous schedules are
predicted by a simulation of a profile of their microbatches, with the measured overhead of an action, others by the
planner. With --advice synchronous schedules are also predicted as ``explain()`` does, which estimates what other
numbers of microbatches take, and the table says which schedule it recommends.

examples:
  python benchmarks/prediction.py
  python benchmarks/prediction.py --network vgg16 --network dense --rounds 3
  python benchmarks/prediction.py --scheme 1f1b --scheme zb-h2/M=8 --advice
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.networks import NETWORKS, Network, build, data
from benchmarks.simulation import FIRST
from benchmarks.step_times import ends_s, mean_s
from benchmarks.turns import taking_turns
from experiments.variants import Variant, variant
from pipetrain.cli.environment import start_tensorflow
from pipetrain.logs import text_table
from pipetrain.schemes.options import with_options
from pipetrain.schemes.table import COPIED


class Job(NamedTuple):
    """One network under some schemes, so many minibatches a round; ``advises``: whether as ``explain()`` predicts."""

    network: Network
    schemes: Sequence[str]
    steps: int
    advises: bool = False


class Figures(NamedTuple):
    """One round: samples/s predicted and of training, between the filling of the pipeline and its drain.

    ``explained`` is what ``explain()`` predicts, if that is asked for.
    """

    predicted: float
    measured: float
    explained: float | None = None

    @property
    def error(self) -> float:
        """By what part the prediction promises too much."""
        return self.predicted / self.measured - 1


class Round(NamedTuple):
    """The figures of each scheme, and the schedule that ``explain()`` recommends, if that is asked for."""

    figures: dict[str, Figures]
    recommended: str | None = None


def work(job: Job) -> Iterator[Round | None]:
    """Train once a round, each of which has new profiles, always with the cuts of the first ones."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    start_tensorflow(2)
    import keras

    import pipetrain
    from benchmarks.expected import MICROBATCHES, Expected, advised, microbatches, profiles, training
    from pipetrain.frontend.layout import available, described
    from pipetrain.plan.partition import partition

    keras.utils.set_random_seed(0)
    network, devices = job.network, available()
    model = build(network)
    x, y = data(network, job.steps * network.batch_size)
    counts = {1} | {microbatches(name) or 1 for name in job.schemes} | ({MICROBATCHES} if job.advises else set())
    known = profiles(model, network, counts)
    cuts, pipes = {}, {}
    for name in job.schemes:
        cuts[name] = partition(known[microbatches(name) or 1], 2, described(devices), training=training(name))
        scheme, horizon, *_ = variant(name)
        pipe = pipetrain.PipelineModel(
            model, cuts[name], with_options(scheme, horizon=horizon), microbatches=microbatches(name)
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        pipe.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss=loss, metrics=["accuracy"])
        pipe.fit(x, y, batch_size=network.batch_size, verbose=0)
        pipes[name] = pipe
    expected = Expected(model, network, cuts, devices)
    yield None
    while True:
        predicted = expected.rates(known)
        explained, recommended = advised(known, job.schemes, devices) if job.advises else ({}, None)
        figures = {}
        for name, pipe in pipes.items():
            taken_s = mean_s(ends_s(pipe, x, y, network.batch_size), FIRST)
            figures[name] = Figures(predicted[name], network.batch_size / taken_s, explained.get(name))
        yield Round(figures, recommended)
        known = profiles(model, network, counts)


def row(network: str, scheme: str, rounds: list[Figures]) -> tuple[str, ...]:
    """A line of the table."""
    errors = [each.error for each in rounds]
    explained = [each.explained for each in rounds if each.explained is not None]
    predicted, measured = (
        statistics.median(getattr(each, name) for each in rounds) for name in ("predicted", "measured")
    )
    return (
        network,
        scheme,
        f"{predicted:.0f}",
        f"{measured:.0f}",
        f"{statistics.median(errors):+.1%}",
        f"{min(errors):+.0%} to {max(errors):+.0%}",
        f"{statistics.median(explained):.0f} ({_explained_error(rounds):+.1%})" if explained else "-",
    )


def _explained_error(rounds: list[Figures]) -> float:
    return statistics.median(each.explained / each.measured - 1 for each in rounds if each.explained is not None)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=NETWORKS, help="(default: all)")
    parser.add_argument(
        "--scheme",
        action="append",
        type=pipeline,
        help="a pipeline, such as zb-h2/M=8; 4 microbatches where it splits minibatches (default: spectrain)",
    )
    parser.add_argument("--advice", action="store_true", help="predict as explain() does too")
    parser.add_argument("--steps", type=int, default=50, help="minibatches a round (default: 50)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    options = parser.parse_args()
    if options.steps <= FIRST:
        parser.error(f"--steps must be more than {FIRST}")
    names, schemes = options.network or [*NETWORKS], [str(each) for each in options.scheme or [variant("spectrain")]]
    jobs = [Job(NETWORKS[name], schemes, options.steps, options.advice) for name in names]
    results = taking_turns(work, jobs, options.rounds)
    print(f"2 cores, medians of {options.rounds} rounds")
    figures = {
        (name, scheme): [each.figures[scheme] for each in rounds]
        for name, rounds in zip(names, results, strict=True)
        for scheme in schemes
    }
    header = ("", "scheme", "predicted samples/s", "measured", "error", "rounds", "explain()")
    print(text_table(header, [row(*place, rounds) for place, rounds in figures.items()]))
    errors = [abs(statistics.median(each.error for each in rounds)) for rounds in figures.values()]
    print(f"median error: {statistics.median(errors):.1%}; largest: {max(errors):.1%}")
    if options.advice:
        for name, rounds in zip(names, results, strict=True):
            print(f"{name}: recommended in the rounds: {', '.join(str(each.recommended) for each in rounds)}")


def pipeline(text: str) -> Variant:
    """A scheme with stages on two devices. Raises ArgumentTypeError for another."""
    found = variant(text)
    if found.scheme in ("single", *COPIED):
        raise argparse.ArgumentTypeError(f"{text!r} has no stages on two devices")
    return found


if __name__ == "__main__":
    main()
