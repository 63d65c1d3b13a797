"""What every stage must know of all stages' gradients before it updates: their norm, and whether they are finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import Step
from pipetrain.run.mailbox import Mailbox
from pipetrain.run.transfers import here, transfer


class Summary(NamedTuple):
    """Of one stage's gradients: whether they are finite, and their squared norm where it is wanted."""

    finite: bool
    squared_norm: tf.Tensor | None


class GradientExchange:
    """Exchanges summaries of all stages' gradients at a flush: from each stage to each other.

    They are read in the order of stages, whichever arrives first. Replicas of a stage have equal gradients, and the
    first replica makes the summary for all of them, so they stay bitwise equal whatever their devices are.

    There is no deadlock: a stage sends its summary after it has sent everything that others need of the minibatch, a
    device waits only after all of its stages have sent theirs, and in a synchronous schedule none of this depends on
    the update. In an asynchronous schedule all stages would wait until the first one is done.

    Args:
        stages: the replicas of every stage.
        scales: whether steps with gradients that are not finite are skipped, see ``LossScale``.
    """

    def __init__(self, stages: Sequence[Sequence[Stage]], scales: bool) -> None:
        self._stages, self._scales = [list(replicas) for replicas in stages], scales
        self._to: list[list[list[Mailbox[Summary]]]] = [
            [[Mailbox() for _ in stages] for _ in replicas] for replicas in stages
        ]

    @property
    def mailboxes(self) -> list[Mailbox[Any]]:
        """All mailboxes at which stages may wait."""
        return [box for stage in self._to for boxes in stage for box in boxes]

    def send(self, stage: int, replica: int, gradients: list[Any], step: Step) -> None:
        """Tell all stages of this one's gradients."""
        if replica:
            return
        mine = self._stages[stage][replica]
        finite = not self._scales or bool(here([mine.all_finite(gradients)])[0])
        summary = Summary(finite, mine.squared_norm(gradients, step) if mine.global_clipnorm and finite else None)
        for boxes in self._to:
            for box in boxes:
                box[stage].put(summary)

    def receive(self, stage: int, replica: int) -> tuple[bool, tf.Tensor | None]:
        """Whether all gradients of all stages are finite and, if their norm is wanted, its squares; waits for them."""
        mine = self._stages[stage][replica]
        summaries = [box.get() for box in self._to[stage][replica]]
        if not all(each.finite for each in summaries):
            return False, None
        squares = [transfer(each.squared_norm, mine.device) for each in summaries if each.squared_norm is not None]
        with tf.device(mine.device):
            return True, tf.stack(squares) if squares else None
