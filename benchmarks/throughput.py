"""Samples/s of every scheme with two stages on two cores, beside what a user would pick instead.

That is plain Keras on one core, on both, and by itself on either at once (which is what the two cores can give), with
XLA and without; MirroredStrategy on two devices (data-parallel); and
PyTorch, where it is installed (pip install "pipetrain[benchmarks]"): on one core, DDP and two of its pipeline schedules
on two pinned processes. All train the same layers at the same batch size with SGD and momentum.

Only one side works at a time: A, B, C, A, B, C, ... so that a machine whose speed drifts is fair to all. Ratios are of
the same round, Keras' and pipetrain's against plain Keras on one core (with XLA or without, whichever is faster),
PyTorch's against PyTorch on one core. The bound is what the cut could reach if no stage ever waited: the sum of the
stages' times over the slowest's, measured while they train (PyTorch's: before).

examples:
  python benchmarks/throughput.py
  python benchmarks/throughput.py --network vgg16 --network transformer --scheme spectrain --scheme 1f1b
  python benchmarks/throughput.py --network dense --scheme all --rounds 9 --without-torch
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import sides, torch_peer
from benchmarks.networks import COMPARED, Network
from benchmarks.sides import FIRST, Figures, KerasJob
from benchmarks.turns import teams_taking_turns
from pipetrain.plan.text_table import text_table
from pipetrain.schemes.table import NAMES

CORES = 2
DEFAULT = ("spectrain", "vanilla", "weight-stashing", "1f1b", "gpipe", "data-parallel")
HEADER = ("samples/s", "against 1 core", "lowest - highest", "bound", "of the bound")


class Options(NamedTuple):
    """What is compared, and for how long."""

    schemes: Sequence[str]
    steps: int
    rounds: int
    with_torch: bool
    brief: bool = False


def work(job: KerasJob | torch_peer.TorchJob) -> Iterator[dict[str, Figures]]:
    """The rounds of one process."""
    return sides.work(job) if isinstance(job, KerasJob) else torch_peer.work(job)


def measured(network: Network, options: Options) -> list[dict[str, Figures]]:
    """Every side's figures, round by round."""
    keras = partial(KerasJob, network, options.steps, xla=not options.brief)
    teams: list[list[Any]] = [[keras(cores)] for cores in ((1,) if options.brief else range(1, CORES + 1))]
    teams.append([keras(1, rank=rank) for rank in range(CORES)])
    teams.append([KerasJob(network, options.steps, CORES, tuple(options.schemes))])
    if options.with_torch:
        teams += torch_peer.teams(network, options.steps)
    results = teams_taking_turns(work, teams, options.rounds)
    return [{name: each for side in number for name, each in side.items()} for number in zip(*results, strict=True)]


def rows(rounds: list[dict[str, Figures]]) -> Iterator[tuple[str, ...]]:
    """A line for every side."""
    middle = partial(_middle, rounds)
    one_core = max((name for name in sides.ONE_CORE if name in rounds[0]), key=middle)
    for name, first in rounds[0].items():
        base = torch_peer.ALONE if name.startswith("PyTorch") else one_core
        ratios = [number[name].samples_per_second / number[base].samples_per_second for number in rounds]
        ratio = statistics.median(ratios)
        cells = (name, f"{middle(name):.0f}", f"{ratio:.2f}", f"{min(ratios):.2f} - {max(ratios):.2f}")
        if first.bound is None:
            yield *cells, "", ""
        else:
            bound = statistics.median(number[name].bound or 0.0 for number in rounds)
            yield *cells, f"{bound:.2f}", f"{ratio / bound:.0%}"


def _middle(rounds: list[dict[str, Figures]], name: str) -> float:
    return statistics.median(number[name].samples_per_second for number in rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=COMPARED, help="several times if wanted (default: all)")
    parser.add_argument(
        "--scheme",
        action="append",
        choices=["all", *NAMES],
        help=f"several times if wanted (default: {', '.join(DEFAULT)})",
    )
    parser.add_argument("--steps", type=int, default=30, help="minibatches of each side a round (default: 30)")
    parser.add_argument("--rounds", type=int, default=5, help="medians are of these (default: 5)")
    parser.add_argument("--without-torch", action="store_true", help="leave PyTorch out, though it is installed")
    parser.add_argument("--brief", action="store_true", help="beside the schemes only Keras on one core, without XLA")
    given = parser.parse_args(arguments)
    if given.steps <= FIRST:
        parser.error(f"--steps must be more than {FIRST}, which fill the pipeline and are not timed")
    with_torch = not (given.without_torch or given.brief)
    if with_torch and not torch_peer.installed():
        print('PyTorch is not installed and left out: pip install "pipetrain[benchmarks]"', file=sys.stderr)
    schemes = NAMES if "all" in (given.scheme or []) else given.scheme or DEFAULT
    options = Options(schemes, given.steps, given.rounds, with_torch and torch_peer.installed(), given.brief)
    for name in given.network or COMPARED:
        network = COMPARED[name]
        found = measured(network, options)
        size = ", ".join(f"{key} {value}" for key, value in network.size.items())
        print(f"{name} ({size}), batch {network.batch_size}; medians of {given.rounds} rounds")
        print(text_table(("", *HEADER), list(rows(found))), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
