"""How minibatches are split: into microbatches, over replicas, and how many are under way at once."""

from __future__ import annotations

import math


def rows_of(rows: int, part: int, parts: int) -> range:
    """The rows of one of so many parts: as even as can be, none where there are too few rows.

    ``rows * part // parts`` up to ``rows * (part + 1) // parts``; of a minibatch's microbatches, and of a microbatch's
    replicas.
    """
    return range(rows * part // parts, rows * (part + 1) // parts)


def microbatch_rows(rows: int, microbatches: int) -> list[range]:
    """The rows of each microbatch of a minibatch."""
    return [rows_of(rows, part, microbatches) for part in range(microbatches)]


def window(stages: int, microbatches: int, flushes: bool) -> int:
    """How many minibatches may be posted ahead of the results taken: ``ceil(N/M) + 2``, or 1 where pipelines flush.

    Without a flush: one microbatch for each of N stages, and two minibatches that wait at the entrance, so that the
    caller may be late. With a flush one, so that whatever the caller does between two minibatches happens between two
    updates.
    """
    return 1 if flushes else math.ceil(stages / microbatches) + 2
