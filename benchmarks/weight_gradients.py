"""What making weight gradients once for all microbatches gains in a synchronous pipeline, and what the order gains.

Two stages on two cores, four microbatches. A way makes the gradient of a dense layer's kernel, or of a convolution's
filter, either for each microbatch, and sums them, or once, of the rows of several; and it takes its actions either in
the order of 1f1b, or in that of a schedule with backwards in halves. So either gain is measured without the other.

Only one way works at a time, each in a process of its own: A, B, C, A, B, C, ... so that a machine whose speed drifts
is fair to all. Ratios are of the same round, against 1f1b with a gradient for each microbatch.

examples:
  python benchmarks/weight_gradients.py
  python benchmarks/weight_gradients.py --network dense --network vgg16 --rounds 9
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import sides, turns  # noqa: E402
from benchmarks.networks import COMPARED, Network  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402

ORDERS = ("1f1b", "zb-h1", "zb-h2")


class Way(NamedTuple):
    """A schedule, and whether weight gradients are made once for several microbatches."""

    network: Network
    scheme: str
    once: bool
    steps: int

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.scheme}, {'once' if self.once else 'each'}"


def work(way: Way) -> Iterator[float]:
    """Milliseconds a minibatch, once a round."""
    from pipetrain.compute.functions import stage_function
    from pipetrain.schemes import programs

    if not way.once:
        stage_function.products = lambda *_: set()
        programs.joined = lambda actions, *_: ([action] for action in actions)
    job = sides.KerasJob(way.network, way.steps, 2, [way.scheme])
    for figures in sides.work(job):
        yield sum(1e3 * way.network.batch_size / each.samples_per_second for each in figures.values())


def table(ways: Sequence[Way], rounds: Sequence[Sequence[float]]) -> str:
    """A row for each way, against the first one."""
    rows = []
    for way, found in zip(ways, rounds, strict=True):
        gains = [first / mine for first, mine in zip(rounds[0], found, strict=True)]
        spread = f"{min(gains):.2f} - {max(gains):.2f}"
        rows.append((way.name, f"{statistics.median(found):.1f}", f"{statistics.median(gains):.2f}", spread))
    return text_table(("", "ms a minibatch", "gain", "lowest - highest"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=COMPARED, help="several times if wanted (default: all)")
    parser.add_argument("--steps", type=int, default=15, help="minibatches of each way a round (default: 15)")
    parser.add_argument("--rounds", type=int, default=5, help="medians are of these (default: 5)")
    options = parser.parse_args(arguments)
    if options.steps <= sides.FIRST:
        parser.error(f"--steps must be more than {sides.FIRST}, which fill the pipeline and are not timed")
    for name in options.network or COMPARED:
        ways = [Way(COMPARED[name], scheme, once, options.steps) for scheme in ORDERS for once in (False, True)]
        found = turns.taking_turns(work, ways, options.rounds)
        print(f"{name}, batch {COMPARED[name].batch_size}; medians of {options.rounds} rounds")
        print(table(ways, found), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
