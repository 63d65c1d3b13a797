"""Does ``scheme="auto"`` take the fastest way to train? Every fixed way and the one taken, in turns in one process.

Two devices on two cores. The ways of a round train in an order that is drawn anew, and are compared within rounds.
Fixed ways that equal the unsplit model: one device, MirroredStrategy, all-reduce, a parameter server, and the
synchronous schedules; where predicted weights are allowed, spectrain with its horizon ``target`` too. The last column
is the rate that was predicted for the way.

examples:
  python benchmarks/auto.py
  python benchmarks/auto.py --network dense --rounds 5
  python benchmarks/auto.py --network inception_v4 --way spectrain/target/M=1 --way "auto, predicted"
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.networks import COMPARED, WORDS, Network, build, data
from benchmarks.networks import NETWORKS as LARGE
from benchmarks.quartiles import quartiles
from benchmarks.sides import KerasJob, compiled, start
from benchmarks.step_times import ends_s, mean_s
from pipetrain.logs import text_table
from pipetrain.schemes.options import Auto, SpecTrain

DEVICES, FIRST = 2, 3
SMALL_GPT = Network("gpt2", (32,), 16, {"depth": 4, "width": 128}, WORDS)
NETWORKS = {**COMPARED, "inception_v4": LARGE["inception_v4"], "gpt2": SMALL_GPT}
FIXED: dict[str, dict[str, Any]] = {
    "single": {"scheme": "single"},
    "data-parallel": {"scheme": "data-parallel"},
    "all-reduce": {"scheme": "all-reduce"},
    "parameter-server": {"scheme": "parameter-server"},
    "1f1b": {"scheme": "1f1b", "microbatches": 4},
    "zb-h2": {"scheme": "zb-h2", "microbatches": 4},
    "zb-v": {"scheme": "zb-v", "microbatches": 2},
}
PREDICTED = {"spectrain/target/M=1": {"scheme": SpecTrain(horizon="target"), "microbatches": 1}}
AUTO = {"auto": {"scheme": "auto"}, "auto, predicted": {"scheme": Auto(staleness="predicted")}}
WAYS = {**FIXED, **PREDICTED, **AUTO}


def measured(
    network: Network, steps: int, rounds: int, ways: Iterable[str]
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Samples/s of one device and of these ways in every round, and what was chosen for those of ``auto``."""
    start(KerasJob(network, steps, DEVICES, ("auto",)))
    import keras

    import pipetrain

    x, y = data(network, steps * network.batch_size)

    def rate(model: keras.Model) -> float:
        return network.batch_size / mean_s(ends_s(model, x, y, network.batch_size), FIRST)

    sides = {}
    for name in dict.fromkeys(["single", *ways]):
        way = WAYS[name]
        keras.utils.set_random_seed(0)
        sides[name] = compiled(pipetrain.PipelineModel(build(network), **way))
        rate(sides[name])
    rates: dict[str, list[float]] = {name: [] for name in sides}
    orders = random.Random()  # another one in each process, where Keras' seeds are the same
    for _ in range(rounds):
        for name in orders.sample([*sides], len(sides)):
            rates[name].append(rate(sides[name]))
    return rates, {name: sides[name].choice for name in AUTO if name in sides}


def report(name: str, rates: dict[str, list[float]], choices: dict[str, Any]) -> str:
    """A table, and how far each choice is from the best fixed way."""
    middle = {way: statistics.median(each) for way, each in rates.items()}
    predicted = {str(way): choice.batch_size / way.step_s for choice in choices.values() for way in choice.ways}
    rows = []
    for way, rate in middle.items():
        taken = str(choices[way].taken) if way in choices else ""
        guess = predicted.get(taken) or next((r for known, r in predicted.items() if _is(known, way)), None)
        against = _within_rounds(rates[way], rates["single"])
        spread = f"{min(against):.2f} - {max(against):.2f}"
        rows.append(
            (way, taken, f"{rate:.0f}", f"{statistics.median(against):.2f}", spread, f"{guess:.0f}" if guess else "-")
        )
    header = ("way", "taken", "samples/s", "against one", "lowest - highest", "predicted")
    allowed = {"auto": FIXED, "auto, predicted": {**FIXED, **PREDICTED}}
    best = [_against_best(auto, [way for way in allowed[auto] if way in rates], rates, choices) for auto in choices]
    return "\n".join((name, text_table(header, rows), *best))


def _against_best(auto: str, fixed: Sequence[str], rates: dict[str, list[float]], choices: dict[str, Any]) -> str:
    """How fast a choice is against the best of the fixed ways, which may be what it took: then both train alike."""
    best = max(fixed, key=lambda way: statistics.median(_within_rounds(rates[way], rates["single"])))
    ratios = _within_rounds(rates[auto], rates[best])
    low, middle, high = quartiles(ratios)
    itself = ", which is what it took" if _is(str(choices[auto].taken), best) else ""
    return f"{auto}: {middle:.2f} ({low:.2f} - {high:.2f}, quartiles) of the best fixed way, {best}{itself}"


def _within_rounds(rates: Sequence[float], others: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(rates, others, strict=True)]


def _is(known: str, way: str) -> bool:
    """Whether a predicted way is this fixed one."""
    scheme, *rest = way.split("/")
    given = {**FIXED, **PREDICTED}.get(way, {})
    same = known.split(", ")[0] == scheme and ("target" in known) == ("target" in rest)
    return same and ("microbatches" not in given or f"microbatches {given['microbatches']}" in known)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="dense", help="which one (default: dense)")
    parser.add_argument("--steps", type=int, default=12, help="minibatches of each way a round (default: 12)")
    parser.add_argument("--rounds", type=int, default=5, help="medians are of these (default: 5)")
    parser.add_argument("--way", choices=WAYS, action="append", help="beside one device (default: all)")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # else the profile would be that of another day
        network = NETWORKS[options.network]
        rates, choices = measured(network, options.steps, options.rounds, options.way or WAYS)
        print(report(options.network, rates, choices))


if __name__ == "__main__":
    main()
