"""Samples/s that a simulation of training gives, against those that training on two cores then reaches.

Each network in a process of its own, one after another. In every round it is profiled, with a minibatch's rows and
with a microbatch's, and trained for an epoch under each scheme; so is a network of next to no work, of as many stages,
whose seconds are what an action costs beside its computing, and what Keras takes between two minibatches.

examples:
  python benchmarks/simulation.py
  python benchmarks/simulation.py --network vgg16 --network dense --rounds 3
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import networks
from benchmarks.networks import Network
from benchmarks.step_times import ends_s, mean_s
from benchmarks.turns import taking_turns
from pipetrain.cli.environment import start_tensorflow
from pipetrain.logs import text_table

if TYPE_CHECKING:
    import keras

NETWORKS = {**networks.NETWORKS, "narrow": Network("dense", (256,), 256, {"depth": 16, "width": 256})}
SCHEMES = ("single", "vanilla", "gpipe", "1f1b")
MICROBATCHES = 4
FIRST = 10  # minibatches that fill the pipeline and warm up
SIDE, SIDE_STEPS = Network("dense", (1,), 4, {"depth": 1, "width": 1}), 100  # of next to no work, and its minibatches
Rates = dict[str, tuple[float, float]]  # by scheme: simulated and measured samples/s


class Job(NamedTuple):
    """One network, so many minibatches a round and scheme."""

    network: Network
    steps: int


class Trained(NamedTuple):
    """A compiled pipeline, and what it reads."""

    pipe: Any
    data: tuple[Any, Any]
    batch_size: int

    def step_s(self) -> float:
        """Seconds of a minibatch in one epoch, after the first ones."""
        return mean_s(ends_s(self.pipe, *self.data, self.batch_size), FIRST)


def pipeline(model: keras.Model, network: Network, steps: int, scheme: str, **settings: Any) -> Trained:
    """The network's model under a scheme, after one epoch."""
    import keras

    import pipetrain

    pieces = MICROBATCHES if scheme in ("gpipe", "1f1b") else None
    pipe = pipetrain.PipelineModel(model, scheme=scheme, microbatches=pieces, **settings)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    pipe.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss=loss, metrics=["accuracy"])
    trained = Trained(pipe, networks.data(network, steps * network.batch_size), network.batch_size)
    trained.step_s()
    return trained


def work(job: Job) -> Iterator[Rates | None]:
    """Profile, simulate and train once a round, always with the cut of the first profile."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    start_tensorflow(2)
    import keras

    import pipetrain
    from pipetrain.compute.graph.blocks import Chain, cut_points
    from pipetrain.frontend.layout import available, described
    from pipetrain.plan.memory import Training
    from pipetrain.plan.partition import partition, plan
    from pipetrain.simulation.simulator import simulate

    keras.utils.set_random_seed(0)
    network, cluster = job.network, described(available())
    model, rows = networks.build(network), network.batch_size
    cuts = partition(pipetrain.profile(model, rows, verbose=False, budget_s=None), 2, cluster).cuts
    ends = cut_points(Chain(model).blocks, cuts)
    empty = networks.build(SIDE)
    sides, trained = {}, {}
    for scheme in SCHEMES:
        two = {} if scheme == "single" else {"stages": 2}
        sides[scheme] = pipeline(empty, SIDE, SIDE_STEPS, scheme, **two)
        trained[scheme] = pipeline(model, network, job.steps, scheme, **({"cuts": cuts} if two else {}))
    yield None
    while True:
        others = {scheme: beside(side) for scheme, side in sides.items()}
        whole = pipetrain.profile(model, rows, verbose=False, budget_s=None)
        pieces = pipetrain.profile(model, rows, verbose=False, budget_s=None, microbatches=MICROBATCHES)
        rates = {}
        for scheme in SCHEMES:
            count = MICROBATCHES if scheme in ("gpipe", "1f1b") else 1
            profile = whole if count == 1 else pieces
            planned = plan(profile, ends, cluster, training=Training(scheme, microbatches=count))
            overhead_s, caller_s = others[scheme]
            caller_s = others["single"][1] if scheme == "vanilla" else caller_s  # which nothing waits for
            trace = simulate(
                planned, scheme, cluster, job.steps, microbatches=count, overhead_s=overhead_s, caller_s=caller_s
            )
            rates[scheme] = rows / trace.step_s, rows / trained[scheme].step_s()
        yield rates


def beside(side: Trained) -> tuple[float, float]:
    """What an action costs beside its computing, and what passes between two minibatches that are not in flight."""
    step_s, stages = side.step_s(), 1 if side.pipe.scheme == "single" else 2
    pieces = MICROBATCHES if side.pipe.scheme in ("gpipe", "1f1b") else 1
    spans = side.pipe.trace.spans[-2 * pieces * stages * SIDE_STEPS :]  # of the newest epoch
    overhead_s = statistics.median((spans.end_s - spans.start_s).tolist())
    return overhead_s, max(0.0, step_s - 2 * (pieces + stages - 1) * overhead_s)


def medians(rounds: list[Rates]) -> dict[str, tuple[float, float, float]]:
    """By scheme: simulated and measured samples/s, and the part by which a simulation promises too much."""
    found = {}
    for scheme in SCHEMES:
        pairs = [each[scheme] for each in rounds]
        simulated, measured = (statistics.median(each) for each in zip(*pairs, strict=True))
        found[scheme] = simulated, measured, statistics.median(a / b - 1 for a, b in pairs)
    return found


def orders(found: dict[str, tuple[float, float, float]]) -> tuple[list[str], int]:
    """Pairs of schemes whose measured samples/s differ by more than 10% but in the other order; and of how many."""
    apart, wrong = 0, []
    for a, b in itertools.combinations(SCHEMES, 2):
        (simulated, measured, _), (its_simulated, its_measured, _) = found[a], found[b]
        if max(measured, its_measured) > 1.1 * min(measured, its_measured):
            apart += 1
            if (simulated > its_simulated) != (measured > its_measured):
                wrong.append(f"{a} and {b}")
    return wrong, apart


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=NETWORKS, help="(default: all)")
    parser.add_argument("--steps", type=int, default=40, help="minibatches a round and scheme (default: 40)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    options = parser.parse_args()
    if options.steps <= FIRST:
        parser.error(f"--steps must be more than {FIRST}")
    rows, errors, wrong, apart = [], [], [], 0
    for name in options.network or [*NETWORKS]:
        (rounds,) = taking_turns(work, [Job(NETWORKS[name], options.steps)], options.rounds)
        found = medians(rounds)
        errors += [error for _, _, error in found.values()]
        cells = [f"{simulated:.0f} / {measured:.0f} ({error:+.0%})" for simulated, measured, error in found.values()]
        rows.append((name, *cells))
        print("  ".join(rows[-1]), file=sys.stderr)
        other, pairs = orders(found)
        wrong += [f"{name}: {each}" for each in other]
        apart += pairs
    print(f"two cores, samples/s simulated / measured, medians of {options.rounds} rounds")
    print(text_table(("", *SCHEMES), rows))
    print(f"median error: {statistics.median(map(abs, errors)):.1%}; largest: {max(map(abs, errors)):.0%}")
    print(f"schemes more than 10% apart: {apart} pairs, of which in the wrong order: {', '.join(wrong) or 'none'}")


if __name__ == "__main__":
    main()
