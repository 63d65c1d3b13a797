"""How minibatches are split: into microbatches, over replicas who sum gradients, and the rows of each part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple


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


class RowsPiece(NamedTuple):
    """What one replica sends another of a microbatch: rows ``start`` up to ``stop`` of its own ``of`` rows."""

    sender: int
    receiver: int
    start: int
    stop: int
    of: int

    @property
    def is_whole(self) -> bool:
        """Whether these are all of its rows."""
        return self.start == 0 and self.stop == self.of


def stream_of(microbatch: int, piece: RowsPiece, ends: tuple[int, int]) -> int:
    """The number of a piece of a minibatch's microbatch among all that stages of so many replicas send each other."""
    senders, receivers = ends
    return (microbatch * senders + piece.sender) * receivers + piece.receiver


class Parts(NamedTuple):
    """A minibatch of so many rows in so many microbatches; replicas have parts of a microbatch each.

    A minibatch without rows has a part everywhere, which has no rows: it has a result, too.
    """

    rows: int
    microbatches: int

    def microbatch(self, number: int) -> range:
        """The rows of a microbatch."""
        return rows_of(self.rows, number, self.microbatches)

    def replica(self, number: int, replica: int, replicas: int) -> range:
        """A replica's rows of a microbatch, counted from the microbatch's first one."""
        return rows_of(len(self.microbatch(number)), replica, replicas)

    def has(self, number: int, replica: int, replicas: int) -> bool:
        """Whether the replica has anything of the microbatch."""
        return not self.rows or len(self.replica(number, replica, replicas)) > 0

    def fraction(self, number: int, replica: int, replicas: int) -> float:
        """A replica's share of a microbatch's rows."""
        rows = len(self.microbatch(number))
        return len(self.replica(number, replica, replicas)) / rows if rows else 1 / replicas

    def share(self, number: int) -> float:
        """A microbatch's share of the minibatch's rows."""
        return len(self.microbatch(number)) / self.rows if self.rows else 1 / self.microbatches

    def pieces(self, number: int, senders: int, receivers: int) -> list[RowsPiece]:
        """What the replicas of one stage send those of the next of a microbatch: the rows that both have."""
        found = []
        for sender in range(senders):
            mine = self.replica(number, sender, senders)
            for receiver in range(receivers):
                theirs = self.replica(number, receiver, receivers)
                start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
                if not self.has(number, sender, senders):
                    continue
                if start < stop or mine == theirs:
                    found.append(RowsPiece(sender, receiver, start - mine.start, stop - mine.start, len(mine)))
        return found

    def form(self, replicas: tuple[int, ...]) -> tuple[tuple[tuple[int, int, bool], ...], ...]:
        """What is the same of all minibatches that one function serves: who sends whom anything, and who all rows."""
        neighbours = {(1, replicas[0]), (replicas[-1], 1), *pairwise(replicas)}
        ways = sorted(neighbours | {(b, a) for a, b in neighbours})
        return tuple(
            tuple((each.sender, each.receiver, each.is_whole) for each in self.pieces(number, *way))
            for number in range(self.microbatches)
            for way in ways
        )
