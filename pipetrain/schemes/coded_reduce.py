"""CodedReduce: a tree of workers, each of which has some rows, that bears so many stragglers under every parent.

Source: Reisizadeh, Prakash, Pedarsani and Avestimehr, CodedReduce (arXiv 1902.01981), Algorithm 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.gradient_codes import ERROR, ROUNDING, Code, amplification, blocks_of, code

ROOT = -1  # the parent of the first workers, which has no rows: who updates the weights
MOST_WORKERS = 4096
MOST_WITHOUT = 4  # parts that a child of a block has not: codes with more are all badly conditioned

Interval = tuple[Fraction, Fraction]  # of a minibatch, which is from 0 to 1


class Tree(NamedTuple):
    """An (n, L)-regular tree: the root and each worker above depth L have n ``children``, of which s may straggle.

    Workers are numbered level by level; the ``ROOT`` is none of them.
    """

    children: int
    depth: int
    stragglers: int

    def __str__(self) -> str:
        return f"({self.children}, {self.depth}), s = {self.stragglers}"

    @property
    def workers(self) -> int:
        """``n + n^2 + ... + n^L``."""
        return int(sum(self.children**level for level in range(1, self.depth + 1)))

    @property
    def load(self) -> Fraction:
        """The share of a minibatch's rows that every worker has: ``1 / sum_{l=1..L} (n/(s+1))^l``."""
        each = Fraction(self.children, self.stragglers + 1)
        return 1 / sum((each**level for level in range(1, self.depth + 1)), start=Fraction(0))

    @property
    def code(self) -> Code:
        """Of the children of every parent."""
        return code(self.children, self.stragglers)

    def parent(self, worker: int) -> int:
        """Who gets the worker's results, and whose weights it takes."""
        return worker // self.children - 1

    def below(self, parent: int) -> range:
        """The children of a worker, or of the root; none of one at depth L."""
        first = self.children * (parent + 1)
        return range(first, first + self.children) if first < self.workers else range(0)

    def place(self, worker: int) -> int:
        """Which of its parent's children it is."""
        return worker % self.children

    def level(self, worker: int) -> int:
        """1 of the root's children."""
        return 1 if worker < self.children else 1 + self.level(self.parent(worker))


def widest(workers: int) -> Tree:
    """All of them children of the root, of whom one may be late if there are others."""
    return Tree(workers, 1, min(1, workers - 1))


class CellsShare(NamedTuple):
    """Cells of a worker whose gradients it sends with one ``coefficient``."""

    coefficient: float
    cells: tuple[int, ...]


class CellsPart(NamedTuple):
    """Cells of a worker whose gradients it makes together, with a coefficient, and their rows of a minibatch."""

    coefficient: float
    cells: tuple[int, ...]
    rows: tuple[range, ...]

    @property
    def size(self) -> int:
        """How many rows these are."""
        return sum(map(len, self.rows))


class Allocation(NamedTuple):
    """Who has which rows of a minibatch.

    ``cells`` are parts of the minibatch, each some intervals, that are the same for everybody: a worker has all of a
    cell or nothing. ``shares`` are what each worker has.
    """

    cells: tuple[tuple[Interval, ...], ...]
    shares: tuple[tuple[CellsShare, ...], ...]

    def load(self, worker: int) -> Fraction:
        """The share of a minibatch's rows that the worker has."""
        return sum((size_of(self.cells[n]) for share in self.shares[worker] for n in share.cells), start=Fraction(0))

    def rows(self, cell: int, rows: int) -> list[range]:
        """The rows of a cell in a minibatch of so many; of all cells together each row once."""
        ranges = [range(rows * start // 1, rows * stop // 1) for start, stop in self.cells[cell]]
        return [each for each in ranges if each]

    def parts(self, worker: int, rows: int, apart: bool) -> list[CellsPart]:
        """What a worker has of a minibatch of so many rows, without parts that have none.

        Cells of one coefficient are one part, unless they are to be ``apart``. A minibatch without rows is the first
        cell's.
        """
        shares = self.shares[worker]
        if apart:
            shares = tuple(CellsShare(coefficient, (n,)) for coefficient, cells in shares for n in cells)
        found = [
            CellsPart(coefficient, cells, tuple(each for n in cells for each in self.rows(n, rows)))
            for coefficient, cells in shares
        ]
        return [part for part in found if part.size or (not rows and 0 in part.cells)]


def size_of(cell: Sequence[Interval]) -> Fraction:
    """The share of a minibatch's rows that it has."""
    return sum((stop - start for start, stop in cell), start=Fraction(0))


class _Piece(NamedTuple):
    """Rows whose gradient counts by a coefficient."""

    start: Fraction
    stop: Fraction
    coefficient: float


@lru_cache(maxsize=64)
def allocated(tree: Tree) -> Allocation:
    """The rows of every worker, all of which have equally many.

    The rows of a parent's subtree are n parts, of which each child's subtree has those that the code says; of these the
    child has the first itself, as many as ``load`` says, and its own children the others.
    """
    pieces: dict[int, list[_Piece]] = {}
    _divide(tree, ROOT, [_Piece(Fraction(0), Fraction(1), 1.0)], pieces)
    bounds = sorted({bound for mine in pieces.values() for piece in mine for bound in piece[:2]})
    numbers = {bound: n for n, bound in enumerate(bounds)}
    holders: list[dict[int, float]] = [{} for _ in bounds[1:]]  # of each interval between bounds
    for worker in range(tree.workers):
        for start, stop, coefficient in pieces[worker]:
            for n in range(numbers[start], numbers[stop]):
                holders[n][worker] = coefficient
    alike: dict[Any, list[Interval]] = defaultdict(list)
    for interval, held in zip(pairwise(bounds), holders, strict=True):
        alike[tuple(sorted(held.items()))].append(interval)
    shares: list[dict[float, list[int]]] = [defaultdict(list) for _ in range(tree.workers)]
    for n, held in enumerate(alike):
        for worker, coefficient in held:
            shares[worker][coefficient].append(n)
    return Allocation(
        tuple(tuple(_joined(intervals)) for intervals in alike.values()),
        tuple(tuple(CellsShare(each, tuple(cells)) for each, cells in mine.items()) for mine in shares),
    )


def _divide(tree: Tree, parent: int, rows: Sequence[_Piece], found: dict[int, list[_Piece]]) -> None:
    """Give the rows of a parent's subtree, but its own, to its children and theirs."""
    size = sum((piece.stop - piece.start for piece in rows), start=Fraction(0)) / tree.children
    parts, rest = [], list(rows)
    for _ in range(tree.children):
        part, rest = _cut(rest, size)
        parts.append(part)
    for child in tree.below(parent):
        place = tree.place(child)
        mine = [
            piece._replace(coefficient=piece.coefficient * tree.code.coefficients[place][part])
            for part in tree.code.parts(place)
            for piece in parts[part]
        ]
        found[child], others = _cut(mine, tree.load)
        if tree.below(child):
            _divide(tree, child, others, found)


def _cut(pieces: Sequence[_Piece], size: Fraction) -> tuple[list[_Piece], list[_Piece]]:
    """The first pieces, as many as have this size, and the others."""
    first, others = [], []
    for piece in pieces:
        middle = min(piece.stop, piece.start + size)
        if middle > piece.start:
            first.append(piece._replace(stop=middle))
        if middle < piece.stop:
            others.append(piece._replace(start=middle))
        size -= middle - piece.start
    return first, others


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    """Neighbours as one."""
    found: list[Interval] = []
    for start, stop in intervals:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def checked_tree(children: Any, depth: Any = 1, stragglers: Any = 1) -> Tree:
    """The tree of these arguments.

    Raises ValueError for what is no count, for as many stragglers as children, for too many workers, and where sums
    could be wrong by more than ``ERROR`` in float32, because the code is badly conditioned or has too many children.
    """
    tree = Tree(
        checked_count("children", children, "A parent has at least one child", 3),
        checked_count("depth", depth, "A tree has at least one level of workers", 1),
        checked_count("stragglers", stragglers, "Stragglers are a number from 0 up", 1, least=0),
    )
    received = f"Received: children={tree.children}, depth={tree.depth}, stragglers={tree.stragglers}. "
    if tree.stragglers >= tree.children:
        raise ValueError(
            f"At least one child of every parent is no straggler. {received}Try stragglers={tree.children - 1}."
        )
    if tree.depth > MOST_WORKERS or tree.workers > MOST_WORKERS:  # to count those of a deeper one could take long
        raise ValueError(f"The tree has more than {MOST_WORKERS} workers. {received}Try fewer children, or depth=1.")
    _check_code(tree, received)
    return tree


def _check_code(tree: Tree, received: str) -> None:
    size = tree.stragglers + 1
    remedy = f"{received}Try a number of children that {size} divides, fewer stragglers, or depth=1."
    without = max(blocks_of(tree.children, tree.stragglers)) - size  # parts of its block that a child has not
    error = ROUNDING * amplification(tree.code) ** tree.depth if without <= MOST_WITHOUT else math.inf
    if error > ERROR:
        raise ValueError(
            f"Gradients could be wrong by more than {ERROR:.0e} of themselves: no well-conditioned code is known. "
            f"{remedy}"
        )
