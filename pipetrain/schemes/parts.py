"""The rows of a minibatch's parts: of each microbatch, and of these at each replica of a stage."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from pipetrain.schemes.splitting import rows_of


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
