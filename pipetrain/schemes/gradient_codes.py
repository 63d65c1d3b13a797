"""Gradient codes: which parts each of n children has, by which coefficients, so that any n - s give the sum.

Source: Tandon et al., Gradient Coding (arXiv 1612.03301): fractional repetition, and the random cyclic code of
Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import combinations, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]

ERROR = 1e-5  # of a decoded sum, of the largest that is allowed, in float32
ROUNDING = 2.0**-23  # of float32
DRAWS = 32  # of a random code, of which the best is taken
MOST_CYCLIC = 400  # children of a cyclic code: no more are looked at
SETS = 400  # of stragglers, at most, by which a code is judged
EXACT = 1e-6  # how near to 1 the coefficients of all parts are where a set of children has the whole sum


class Code(NamedTuple):
    """A matrix B, n x n: child i sends the sum over parts k of ``coefficients[i][k]`` times the part's gradient.

    Whatever ``stragglers`` of the n are missing, the others' rows have a combination that is 1 in every column.
    """

    coefficients: tuple[tuple[float, ...], ...]
    stragglers: int

    @property
    def children(self) -> int:
        """How many there are, and as many parts."""
        return len(self.coefficients)

    def parts(self, child: int) -> list[int]:
        """The parts that a child has: a run of neighbours, of which the first part comes after the last one."""
        has = [each != 0.0 for each in self.coefficients[child]]
        first = next((part for part, mine in enumerate(has) if mine and not has[part - 1]), 0)
        return [(first + turn) % self.children for turn in range(sum(has))]

    @property
    def repeats(self) -> bool:
        """Whether s + 1 children at a time have the same parts."""
        return self.children % (self.stragglers + 1) == 0

    @property
    def matrix(self) -> Reals:
        """B."""
        return np.array(self.coefficients, dtype=np.float64)


def fractional_repetition(children: int, stragglers: int) -> Code:
    """Groups of s + 1 children, each of which has all parts of its group; needs that s + 1 divides n."""
    size = stragglers + 1
    return Code(
        tuple(tuple(float(i // size == k // size) for k in range(children)) for i in range(children)), stragglers
    )


def cyclic(children: int, stragglers: int, seed: int = 0) -> Code:
    """Child i has the parts i, ..., i + s (modulo n), by coefficients from a random matrix (Algorithm 2).

    H is s x n with rows that sum to 0; a row of B is in the null space of H, as is the vector of ones.
    """
    rng = np.random.default_rng(seed)
    null = rng.standard_normal((stragglers, children))
    null[:, -1] = -null[:, :-1].sum(axis=1)
    matrix = np.zeros((children, children))
    for child in range(children):
        first, *others = [(child + turn) % children for turn in range(stragglers + 1)]
        matrix[child, first] = 1.0
        matrix[child, others] = -np.linalg.solve(null[:, others], null[:, first])
    return Code(tuple(map(tuple, matrix.tolist())), stragglers)


@lru_cache(maxsize=256)
def code(children: int, stragglers: int) -> Code:
    """Fractional repetition where s + 1 divides n, else the best of some cyclic codes; always the same one."""
    if not children % (stragglers + 1):
        return fractional_repetition(children, stragglers)
    drawn = [cyclic(children, stragglers, seed) for seed in range(DRAWS)]
    return min(drawn, key=amplification)


def decoding(chosen: Code, finished: Sequence[int]) -> list[tuple[int, float]] | None:
    """Coefficients a with a^T B = 1^T of some of the ``finished`` children, the first of them that suffice.

    None while they do not. Children whose coefficient is 0 are left out; the others are in order of their numbers.
    """
    if chosen.repeats:
        size = chosen.stragglers + 1
        of_group = {child // size: child for child in reversed(finished)}
        complete = len(of_group) * size == chosen.children
        return [(child, 1.0) for _, child in sorted(of_group.items())] if complete else None
    needed = chosen.children - chosen.stragglers
    return None if len(finished) < needed else _solved(chosen, tuple(sorted(finished[:needed])))


@lru_cache(maxsize=4096)
def _solved(chosen: Code, finished: tuple[int, ...]) -> list[tuple[int, float]]:
    rows = chosen.matrix[np.array(finished)]
    solution = np.ones(chosen.children) @ np.linalg.pinv(rows)  # of the least norm
    return [(child, float(each)) for child, each in zip(finished, solution, strict=True) if each]


def amplification(chosen: Code) -> float:
    """By how much a decoded sum's rounding may be larger than that of a plain sum of n parts.

    The largest ``sum_i |a_i| sum_k |B_ik| / n`` of all sets of stragglers, of which many are tried if there are too
    many; infinite where one cannot be decoded. 1 for fractional repetition. The code is that or a cyclic one.
    """
    if chosen.repeats:
        return 1.0
    matrix = chosen.matrix
    gone = np.array([sorted(each) for each in _straggling(chosen)])
    try:
        some, vanishing = _combinations(matrix, chosen.stragglers)
        factors = np.linalg.solve(vanishing[:, gone].transpose(1, 2, 0), -some[gone][..., None])[..., 0]
    except np.linalg.LinAlgError:
        return math.inf
    solutions = some + factors @ vanishing
    np.put_along_axis(solutions, gone, 0.0, axis=1)
    exact = np.abs(solutions @ matrix - 1.0).max() < EXACT
    return float((np.abs(solutions) @ np.abs(matrix).sum(axis=1)).max() / chosen.children) if exact else math.inf


def _combinations(matrix: Reals, stragglers: int) -> tuple[Reals, Reals]:
    """Some a with a^T B = 1^T of a cyclic code, and s others, row by row, with which it is 0^T.

    Their sums are all such a. That of which s given children are 0 is so found by an s x s system, in place of one
    with n - s unknowns for every set of stragglers. In B the first n - s children's first n - s parts are a triangle
    with ones on its diagonal; the last s children are free.
    """
    count = len(matrix) - stragglers
    sides = np.column_stack([np.ones(count), -matrix[count:, :count].T])
    solved = np.linalg.solve(matrix[:count, :count].T, sides)
    some = np.concatenate([solved[:, 0], np.zeros(stragglers)])
    return some, np.concatenate([solved[:, 1:].T, np.eye(stragglers)], axis=1)


def _straggling(chosen: Code) -> Iterable[Collection[int]]:
    """All sets of s stragglers, or many of them, neighbours among them: these have the most parts in common."""
    count, stragglers = chosen.children, chosen.stragglers
    if math.comb(count, stragglers) <= SETS:
        return combinations(range(count), stragglers)
    rng = np.random.default_rng(count)
    neighbours = [{(first + turn) % count for turn in range(stragglers)} for first in range(count)]
    drawn = (set(map(int, rng.choice(count, stragglers, replace=False))) for _ in range(SETS))
    return [*neighbours, *islice(drawn, SETS - count)]
