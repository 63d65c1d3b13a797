"""CodedReduce (arXiv 1902.01981): linear and logistic regression on 84 workers, (4, 3), and on 156, (12, 2).

Four ways to sum gradients: a master that waits for all workers (uncoded), a ring that does (all-reduce), a master that
waits for all but some (gradient coding, arXiv 1612.03301), and the tree. Workers' seconds are random: exponential,
``rows * row_us * E``, or shifted, ``rows * row_us * (1 + E)``, where E is exponential with mean 1. Steps are simulated
message by message, with what a message takes at either end's port, ``bytes / bandwidth + message_us``.

In the coded ways alpha is the part of a parent's children that may be late, and as many stragglers are tried as have
codes of repeated rows. beta is how many times as fast a sum is sent as by a master who takes message after message:
1 (uncoded), about N/2 (ring), N / (N - s) (gradient coding), N / (L (n - s)) (tree).

As in the source, all workers are free when a step begins. In pipetrain a late worker first finishes what it is at; the
milliseconds of that are beside.

The regressions are computed from what workers would send, decoded from random sets of them; the losses of all ways are
the same, step by step, and seconds are those simulated.

Takes 1 minute. Results are kept as they come.

examples:
  python experiments/coded_reduce.py
  python experiments/coded_reduce.py --tree 12,2 --row-us 100 --message-us 1000
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.options import writable  # noqa: E402
from experiments.progress import tracked, write_rows  # noqa: E402
from pipetrain.cli.arguments import Folded, count, from_zero, positive_number  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402
from pipetrain.plan.cluster import Cluster, Level, Link  # noqa: E402
from pipetrain.schemes.coded_reduce import ROOT as MASTER  # noqa: E402
from pipetrain.schemes.coded_reduce import Tree, allocated  # noqa: E402
from pipetrain.schemes.gradient_codes import decoding  # noqa: E402
from pipetrain.simulation.coded_reduce import TreeSetting, TreeTraining  # noqa: E402

Reals = NDArray[np.float64]

TREES = ("4,3", "12,2")
ROWS, FEATURES, NUMBER_BYTES = 6552, 5000, 4  # of a minibatch; of a row, as in the source
TIMES = ("exponential", "shifted")
ROW_US = (1.0, 10.0, 100.0, 1000.0)
LEARNED = 400  # features of the regressions that are computed
ROUNDS = 30
KINDS = ("linear", "logistic")
PUBLISHED = {"gradient coding": 27.2, "ring": 7.0}  # times as fast at most, on EC2
SEED = 0


class Outcome(NamedTuple):
    """One way to sum gradients: alpha, beta, the part of the rows that a worker has, and the milliseconds of a step.

    ``step_ms`` is that of a step for which all workers are free when it begins; ``busy_ms`` where those that were late
    first finish the step before.
    """

    workers: int
    tree: str
    times: str
    row_us: float
    way: str
    stragglers: int
    alpha: float
    beta: float
    load: float
    step_ms: float
    busy_ms: float


class Learned(NamedTuple):
    """A regression after so many steps; ``error`` is that of the decoded sum, as a part of the plain one."""

    tree: str
    kind: str
    step: int
    loss: float
    error: float


class Cell(NamedTuple):
    """A tree, and the seconds of its workers."""

    tree: Tree  # without stragglers
    times: str
    row_us: float

    def __str__(self) -> str:
        return f"{self.tree.workers} workers, {self.times}, {self.row_us:g} us a row"


def factors(times: str, seed: int) -> Callable[[int], float]:
    """By how much longer a worker's computing takes, drawn anew each time."""
    rng, least = np.random.default_rng(seed), float(times == "shifted")
    return lambda worker: least + float(rng.exponential())


def simulated_s(tree: Tree, cell: Cell, link: Link, steps: int) -> tuple[float, float]:
    """The mean seconds of a step, all workers being free when it begins, and where late ones finish what they are at.

    What a message takes beside its bytes is as many bytes more.
    """
    size_bytes = round(FEATURES * NUMBER_BYTES + link.latency_s * link.bandwidth_bytes_per_s)
    cluster = Cluster((Level(Link(link.bandwidth_bytes_per_s)),))
    seconds = float(tree.load) * ROWS * cell.row_us * 1e-6
    setting = TreeSetting(tree, seconds, size_bytes, 0.0, 0.0, cluster, factors(cell.times, SEED))
    alone = [TreeTraining(setting, 1).run().spans for _ in range(steps)]
    updated_s = [float(each[(each.replica == 0) & (each.op == "B")].start_s[0]) for each in alone]
    return float(np.mean(updated_s)), TreeTraining(setting, steps).run().step_s


def ring_s(workers: int, cell: Cell, link: Link, steps: int) -> tuple[float, float]:
    """All are waited for, then sum in a ring."""
    factor, seconds = factors(cell.times, SEED), ROWS / workers * cell.row_us * 1e-6
    slowest = [max(factor(worker) for worker in range(workers)) for _ in range(steps)]
    step_s = seconds * float(np.mean(slowest)) + link.reduce_seconds(FEATURES * NUMBER_BYTES, workers)
    return step_s, step_s


def borne(children: int) -> list[int]:
    """Of how many children all but one part may be late, with rows repeated: s + 1 divides their number."""
    return [each - 1 for each in range(2, children) if children % each == 0]


def outcomes(cell: Cell, link: Link, steps: int) -> Iterator[Outcome]:
    """All ways; gradient coding bears as nearly the same part of its workers as the tree does, rows repeated."""
    (n, depth, _), workers = cell.tree, cell.tree.workers
    name = f"({n}, {depth})"

    def found(way: str, tree: Tree, beta: float, seconds: tuple[float, float]) -> Outcome:
        s, most = tree.stragglers, tree.children
        about = workers, name, cell.times, cell.row_us, way, s, s / most, beta
        return Outcome(*about, float(tree.load), *(1e3 * each for each in seconds))

    star = Tree(workers, 1, 0)
    yield found("uncoded master", star, 1.0, simulated_s(star, cell, link, steps))
    yield found("ring", star, workers**2 / (2 * (workers - 1)), ring_s(workers, cell, link, steps))
    for s in borne(n):
        of_star = max((each for each in borne(workers) if each <= workers * s / n), default=1)
        one, tree = Tree(workers, 1, of_star), Tree(n, depth, s)
        yield found("gradient coding", one, workers / (workers - of_star), simulated_s(one, cell, link, steps))
        beta = workers / (depth * (n - s))
        yield found("coded reduce", tree, beta, simulated_s(tree, cell, link, steps))


def decoded(tree: Tree, own: Sequence[Reals], rng: np.random.Generator, parent: int = MASTER) -> Reals:
    """What a parent decodes of its children, of which a random set is late."""
    children = tree.below(parent)
    total = np.zeros_like(own[0])
    if not children:
        return total
    there = rng.permutation(tree.children)[: tree.children - tree.stragglers].tolist()
    for place, coefficient in decoding(tree.code, there) or ():
        child = children[place]
        total += coefficient * (own[child] + decoded(tree, own, rng, child))
    return total


def regression(kind: str, tree: Tree, rows: int, features: int, rounds: int) -> Iterator[Learned]:
    """Gradient descent by what the tree decodes; the data are drawn from a model of this kind."""
    rng = np.random.default_rng(SEED)
    x, truth = rng.standard_normal((rows, features)), rng.standard_normal(features)
    scores = x @ truth
    y = scores + rng.standard_normal(rows) if kind == "linear" else rng.uniform(size=rows) < 1 / (1 + np.exp(-scores))
    allocation = allocated(tree)
    mine = []  # of each worker its rows, with their coefficients
    for shares in allocation.shares:
        pairs = [
            (row, each.coefficient)
            for each in shares
            for cell in each.cells
            for part in allocation.rows(cell, rows)
            for row in part
        ]
        mine.append(tuple(np.array(each) for each in zip(*pairs, strict=True)))
    rate = (1.0 if kind == "linear" else 4.0) / (rows**0.5 + features**0.5) ** 2
    weights, error = np.zeros(features), 0.0
    name = f"({tree.children}, {tree.depth})"
    for step in range(rounds):
        residuals = _expected(kind, x @ weights) - y
        yield Learned(name, kind, step, _loss(kind, x @ weights, y), error)
        plain = x.T @ residuals
        own = [x[each].T @ (coefficients * residuals[each]) for each, coefficients in mine]
        gradient = decoded(tree, own, rng)
        error = float(np.abs(gradient - plain).max() / np.abs(plain).max())
        weights -= rate * gradient
    yield Learned(name, kind, rounds, _loss(kind, x @ weights, y), error)


def _expected(kind: str, scores: Reals) -> Reals:
    return scores if kind == "linear" else 1 / (1 + np.exp(-scores))


def _loss(kind: str, scores: Reals, y: Reals) -> float:
    if kind == "linear":
        return float(np.mean((scores - y) ** 2))
    return float(np.mean(np.logaddexp(0.0, scores) - y * scores))


def fastest(found: Sequence[Outcome]) -> dict[tuple[str, str, float], dict[str, Outcome]]:
    """Of each tree and seconds the stragglers with which every way is fastest."""
    best: dict[tuple[str, str, float], dict[str, Outcome]] = {}
    for each in found:
        ways = best.setdefault(each[1:4], {})
        if each.way not in ways or each.step_ms < ways[each.way].step_ms:
            ways[each.way] = each
    return best


def report(found: Sequence[Outcome], learned: Sequence[Learned]) -> str:
    """Alpha and beta, milliseconds with the best number of stragglers, and how the regressions went."""
    first = [each for each in found if each[2:4] == found[0][2:4]]
    header = ("workers", "tree", "way", "s", "alpha", "beta", "part of the rows")
    rows = [
        (
            *(str(each.workers), each.tree, each.way, str(each.stragglers)),
            *(f"{each.alpha:.2f}", f"{each.beta:.1f}", f"{each.load:.4f}"),
        )
        for each in dict.fromkeys(each._replace(step_ms=0.0, busy_ms=0.0) for each in found)
        if each[2:4] == first[0][2:4]
    ]
    parts = [text_table(header, rows)]
    ways, rows = ("uncoded master", "ring", "gradient coding", "coded reduce"), []
    for (tree, times, row_us), of_ways in fastest(found).items():
        ours = of_ways["coded reduce"].step_ms
        steps = [f"{of_ways[way].step_ms:.1f}" for way in ways]
        gains = [f"{of_ways[way].step_ms / ours:.2f}x" for way in ways[:-1]]
        coded = of_ways["coded reduce"]
        rows.append((tree, times, f"{row_us:g}", *steps, *gains, str(coded.stragglers), f"{coded.busy_ms:.1f}"))
    header = (
        *("tree", "seconds", "us a row", *(f"{way} ms" for way in ways)),
        *(f"over {way}" for way in ways[:-1]),
        *("s of the tree", "ms if late workers finish"),
    )
    parts.append(text_table(header, rows))
    for way, published in PUBLISHED.items():
        most = max(of_ways[way].step_ms / of_ways["coded reduce"].step_ms for of_ways in fastest(found).values())
        parts.append(f"over {way}: at most {most:.1f}x; published, on EC2: up to {published:g}x")
    last = [each for each in learned if each.step == ROUNDS]
    rows = [
        (
            *(each.tree, each.kind, f"{next(one.loss for one in learned if one[:2] == each[:2]):.3f}"),
            *(f"{each.loss:.3f}", f"{max(one.error for one in learned if one[:2] == each[:2]):.1e}"),
        )
        for each in last
    ]
    header = ("tree", "regression", "loss at first", f"after {ROUNDS} steps", "largest error of a decoded sum")
    return "\n\n".join([*parts, text_table(header, rows)])


def tree_of(text: str) -> Tree:
    """``4,3``: children and depth."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no tree such as 4,3: children and depth")
    tree = Tree(int(parts[0]), int(parts[1]), 0)
    if not borne(tree.children) or not borne(tree.workers):
        raise argparse.ArgumentTypeError(f"{text!r} has no number of children with a divisor. Try 4,3")
    return tree


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    add = parser.add_argument
    add("--tree", action="append", type=tree_of, metavar="N,L", help="several times (default: 4,3 and 12,2)")
    add("--row-us", action="append", type=positive_number, metavar="US", help="mean of a row (default: 1 to 1000)")
    add(
        "--message-us", type=from_zero, default=200.0, metavar="US", help="of a message beside its bytes (default: 200)"
    )
    add("--gbit", type=positive_number, default=1.0, metavar="GB/S", help="Gb/s of a port (default: 1)")
    add("--steps", type=count, default=40, metavar="N", help="that are simulated (default: 40)")
    add("--output", type=Path, metavar="DIR", help="where results go (default: runs/coded_reduce)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    options = parse(arguments)
    try:
        output = writable(options.output or ROOT / "runs" / "coded_reduce")
    except ValueError as error:
        print(f"coded_reduce.py: {error}", file=sys.stderr)
        return 2
    trees = options.tree or [tree_of(each) for each in TREES]
    link = Link(options.gbit * 1e9 / 8, options.message_us * 1e-6)
    found, learned = list[Outcome](), list[Learned]()
    cells = [Cell(*each) for each in itertools.product(trees, TIMES, options.row_us or ROW_US)]
    for cell in tracked(cells, [*map(str, cells)]):
        found += outcomes(cell, link, options.steps)
        path = write_rows(output / "coded_reduce.csv", [each._asdict() for each in found])
    studies = [*itertools.product(KINDS, trees)]
    for kind, tree in tracked(studies, [f"{kind} regression, {tree.workers} workers" for kind, tree in studies]):
        coded = tree._replace(stragglers=borne(tree.children)[0])
        learned += regression(kind, coded, ROWS, LEARNED, ROUNDS)
        write_rows(output / "coded_regression.csv", [each._asdict() for each in learned])
    from plots.coded_reduce import draw

    print(f"{report(found, learned)}\n\n{draw(path, output / 'coded_reduce.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
