"""How minibatches are split: into microbatches, over replicas who sum gradients, and how many are under way at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def rows_of(rows: int, part: int, parts: int) -> range:
    """The rows of one of so many parts: as even as can be, none where there are too few rows.

    ``rows * part // parts`` up to ``rows * (part + 1) // parts``; of a minibatch's microbatches, and of a microbatch's
    replicas.
    """
    return range(rows * part // parts, rows * (part + 1) // parts)


def microbatch_rows(rows: int, microbatches: int) -> list[range]:
    """The rows of each microbatch of a minibatch."""
    return [rows_of(rows, part, microbatches) for part in range(microbatches)]


def shared_out(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The items of each of a number of owners: the largest item first, to the owner with the least so far."""
    owned: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owner = loads.index(min(loads))
        owned[owner].append(n)
        loads[owner] += sizes[n]
    return owned


def reduction_bytes(size_bytes: int, owned_bytes: int | Fraction, replicas: int) -> int:
    """What one of r replicas sends, who sums ``owned`` bytes of the gradients, so that all have the sums of all.

    ``size + (r-2) * owned``: to the others the gradients that they sum, and to each of them the sums of its own; about
    ``2 * (r-1)/r`` of the size.
    """
    return math.floor(size_bytes + (replicas - 2) * owned_bytes)


def window(stages: int, microbatches: int, flushes: bool) -> int:
    """How many minibatches may be posted ahead of the results taken: ``ceil(N/M) + 2``, or 1 where pipelines flush.

    Without a flush: one microbatch for each of N stages, and two minibatches that wait at the entrance, so that the
    caller may be late. With a flush one, so that whatever the caller does between two minibatches happens between two
    updates.
    """
    return 1 if flushes else math.ceil(stages / microbatches) + 2
