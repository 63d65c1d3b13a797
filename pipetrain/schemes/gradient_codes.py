"""Gradient codes: which parts each of n children has, by which coefficients, so that any n - s give the sum.

Source: Tandon et al., Gradient Coding (arXiv 1612.03301): fractional repetition, and the random cyclic code of
Algorithm 2. A cyclic code of many children is badly conditioned. Where s + 1 does not divide n, children are therefore
in as many blocks as can be, each of which has parts and a code of its own and bears s stragglers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, combinations, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Rows = tuple[tuple[float, ...], ...]

ERROR = 1e-5  # of a decoded sum, of the largest that is allowed, in float32
ROUNDING = 2.0**-23  # of float32
DRAWS = 32  # of a random code, of which the best is taken
MOST_DRAWN = 40  # children of a block: of more, no random codes are drawn
SETS = 400  # of stragglers, at most, by which a code is judged
EXACT = 1e-6  # how near to 1 the coefficients of all parts are where a set of children has the whole sum


class Code(NamedTuple):
    """A matrix B, n x n: child i sends the sum over parts k of ``coefficients[i][k]`` times the part's gradient.

    Children, and the parts of the same numbers, are in ``blocks`` of so many. Whatever ``stragglers`` of a block are
    missing, the others' rows have a combination that is 1 in every column of it. In blocks of s + 1 all have all parts.
    """

    coefficients: Rows
    stragglers: int
    blocks: tuple[int, ...]

    @property
    def children(self) -> int:
        """How many there are, and as many parts."""
        return len(self.coefficients)

    def parts(self, child: int) -> list[int]:
        """The parts that a child has: a run of neighbours, of which the block's first comes after its last one."""
        has = [part for part, each in enumerate(self.coefficients[child]) if each]
        first = next((n for n in range(1, len(has)) if has[n] - has[n - 1] > 1), 0)
        return has[first:] + has[:first]

    @property
    def matrix(self) -> Reals:
        """B."""
        return np.array(self.coefficients, dtype=np.float64)

    def block(self, number: int) -> Rows:
        """What of B is within a block."""
        first, last = (sum(self.blocks[:end]) for end in (number, number + 1))
        return tuple(row[first:last] for row in self.coefficients[first:last])


def repeated(children: int) -> Code:
    """One block of s + 1 children, each of which has all parts."""
    return Code(((1.0,) * children,) * children, children - 1, (children,))


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
    return Code(tuple(map(tuple, matrix.tolist())), stragglers, (children,))


def polynomial(children: int, stragglers: int, nodes: Sequence[float]) -> Code:
    """The same parts, by the values of polynomials of the degree n - s - 1 at the parts' nodes.

    That of a child is 0 at the nodes of the parts that it has not. Any n - s of them are a basis of the polynomials of
    this degree, of which 1 is one.
    """
    matrix = np.zeros((children, children))
    for child in range(children):
        has = [(child + turn) % children for turn in range(stragglers + 1)]
        missing = [nodes[part] for part in range(children) if part not in has]
        matrix[child, has] = [math.prod(nodes[part] - each for each in missing) for part in has]
        matrix[child] /= matrix[child, child]
    return Code(tuple(map(tuple, matrix.tolist())), stragglers, (children,))


def blocks_of(children: int, stragglers: int) -> tuple[int, ...]:
    """The children of each block: at least s + 1, in as many blocks as can be, which are as equal as can be."""
    count, over = divmod(children, stragglers + 1)
    each, more = divmod(over, count)
    return tuple(stragglers + 1 + each + (n >= count - more) for n in range(count))


@lru_cache(maxsize=256)
def code(children: int, stragglers: int) -> Code:
    """The best code that is known; always the same one. Where s + 1 divides n it is fractional repetition."""
    blocks = blocks_of(children, stragglers)
    rows = []
    for first, size in zip(accumulate(blocks, initial=0), blocks, strict=False):
        before, behind = (0.0,) * first, (0.0,) * (children - first - size)
        rows += [before + row + behind for row in _best(size, stragglers).coefficients]
    return Code(tuple(rows), stragglers, blocks)


@lru_cache(maxsize=256)
def _best(children: int, stragglers: int) -> Code:
    """Of one block."""
    if children == stragglers + 1:
        return repeated(children)
    return min(_candidates(children, stragglers), key=amplification)


def _candidates(children: int, stragglers: int) -> Iterator[Code]:
    """With equal distances between nodes, with those of Chebyshev, and random ones."""
    places = np.arange(children) + 0.5
    yield polynomial(children, stragglers, (places / children).tolist())
    yield polynomial(children, stragglers, np.cos(np.pi * places / children).tolist())
    for seed in range(DRAWS if children <= MOST_DRAWN else 0):
        yield cyclic(children, stragglers, seed)


def decoding(chosen: Code, finished: Sequence[int]) -> list[tuple[int, float]] | None:
    """Coefficients a with a^T B = 1^T of some of the ``finished`` children, of each block the first that suffice.

    None while they do not. Children whose coefficient is 0 are left out; the others are in order of their numbers.
    """
    numbers, here = _numbers(chosen.blocks), [list[int]() for _ in chosen.blocks]
    for child in finished:
        here[numbers[child]].append(child)
    needed = [size - chosen.stragglers for size in chosen.blocks]
    if any(len(mine) < least for mine, least in zip(here, needed, strict=True)):
        return None
    found = []
    for number, (mine, least) in enumerate(zip(here, needed, strict=True)):
        found += _solved(chosen, number, tuple(sorted(mine[:least]))) if least > 1 else [(mine[0], 1.0)]
    return found


@lru_cache(maxsize=256)
def _numbers(blocks: tuple[int, ...]) -> list[int]:
    """Of each child's block."""
    return [number for number, size in enumerate(blocks) for _ in range(size)]


@lru_cache(maxsize=4096)
def _solved(chosen: Code, number: int, finished: tuple[int, ...]) -> list[tuple[int, float]]:
    first = sum(chosen.blocks[:number])
    rows = np.array(chosen.block(number))[np.array(finished) - first]
    solution = np.ones(rows.shape[1]) @ np.linalg.pinv(rows)  # of the least norm
    return [(child, float(each)) for child, each in zip(finished, solution, strict=True) if each]


def amplification(chosen: Code) -> float:
    """By how much a decoded sum's rounding may be larger than that of a plain sum of n parts.

    The largest ``sum_i |a_i| sum_k |B_ik| / n`` of all sets of stragglers, of s of every block, of which many are tried
    if there are too many; infinite where one cannot be decoded. 1 for fractional repetition.
    """
    sizes = [
        size if size == chosen.stragglers + 1 else _largest(chosen.block(number), chosen.stragglers)
        for number, size in enumerate(chosen.blocks)
    ]
    return sum(sizes) / chosen.children


@lru_cache(maxsize=256)
def _largest(rows: Rows, stragglers: int) -> float:
    """The largest ``sum_i |a_i| sum_k |B_ik|`` of a block, which is cyclic."""
    matrix = np.array(rows)
    gone = np.array([sorted(each) for each in _straggling(len(rows), stragglers)])
    try:
        some, vanishing = _combinations(matrix, stragglers)
        factors = np.linalg.solve(vanishing[:, gone].transpose(1, 2, 0), -some[gone][..., None])[..., 0]
    except np.linalg.LinAlgError:
        return math.inf
    solutions = some + factors @ vanishing
    np.put_along_axis(solutions, gone, 0.0, axis=1)
    exact = np.abs(solutions @ matrix - 1.0).max() < EXACT
    return float((np.abs(solutions) @ np.abs(matrix).sum(axis=1)).max()) if exact else math.inf


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


def _straggling(count: int, stragglers: int) -> Iterable[Collection[int]]:
    """All sets of s stragglers, or many of them, neighbours among them: these have the most parts in common."""
    if math.comb(count, stragglers) <= SETS:
        return combinations(range(count), stragglers)
    rng = np.random.default_rng(count)
    neighbours = [{(first + turn) % count for turn in range(stragglers)} for first in range(min(count, SETS))]
    drawn = (set(map(int, rng.choice(count, stragglers, replace=False))) for _ in range(SETS))
    return [*neighbours, *islice(drawn, SETS - len(neighbours))]
