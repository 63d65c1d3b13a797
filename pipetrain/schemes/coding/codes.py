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
    return Code(tuple(tuple(map(float, row)) for row in matrix), stragglers)


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
    (solution,) = _solutions(chosen.matrix, [finished])
    return [(child, float(each)) for child, each in zip(finished, solution, strict=True) if each]


def _solutions(matrix: Reals, sets: Sequence[Sequence[int]]) -> Reals:
    """For each set of children the a of the least norm with a^T B_set = 1^T, as far as there is one."""
    rows = matrix[np.array(sets, dtype=np.int64)]
    found: Reals = np.ones(matrix.shape[1]) @ np.linalg.pinv(rows)
    return found


def amplification(chosen: Code) -> float:
    """By how much a decoded sum's rounding may be larger than that of a plain sum of n parts.

    The largest ``sum_i |a_i| sum_k |B_ik| / n`` of all sets of stragglers, of which many are tried if there are too
    many; infinite where one cannot be decoded. 1 for fractional repetition.
    """
    matrix = chosen.matrix
    sets = [[i for i in range(chosen.children) if i not in gone] for gone in _straggling(chosen)]
    solutions = _solutions(matrix, sets)
    rows = matrix[np.array(sets)]
    exact = np.abs(np.einsum("si,sik->sk", solutions, rows) - 1.0).max() < EXACT
    worst = np.einsum("si,sik->s", np.abs(solutions), np.abs(rows)).max() / chosen.children
    return float(worst) if exact else math.inf


def _straggling(chosen: Code) -> Iterable[Collection[int]]:
    """All sets of s stragglers, or many of them, neighbours among them: these have the most parts in common."""
    count, stragglers = chosen.children, chosen.stragglers
    if math.comb(count, stragglers) <= SETS:
        return combinations(range(count), stragglers)
    rng = np.random.default_rng(count)
    neighbours = [{(first + turn) % count for turn in range(stragglers)} for first in range(count)]
    drawn = (set(map(int, rng.choice(count, stragglers, replace=False))) for _ in range(SETS))
    return [*neighbours, *islice(drawn, SETS - count)]
