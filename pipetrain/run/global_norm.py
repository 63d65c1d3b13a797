"""The norm of all stages' gradients, for clipping by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.functions.stage import Stage
from pipetrain.run.mailbox import Mailbox
from pipetrain.run.transfers import transfer


class GlobalNorm:
    """Exchanges the squared norms of all stages' gradients at a flush: one number from each stage to each other.

    The numbers are read in the order of stages, whichever arrives first. Replicas of a stage have equal gradients, and
    the first replica computes the norm for all of them, so they stay bitwise equal whatever their devices are.

    There is no deadlock: a stage sends its number after it has sent everything that others need of the minibatch, and
    in a synchronous schedule none of this depends on the update. In an asynchronous schedule all stages would wait
    until the first one is done.

    Args:
        stages: the replicas of every stage.
    """

    def __init__(self, stages: Sequence[Sequence[Stage]]) -> None:
        self._stages = [list(replicas) for replicas in stages]
        self._to: list[list[list[Mailbox[tf.Tensor]]]] = [
            [[Mailbox() for _ in stages] for _ in replicas] for replicas in stages
        ]

    @property
    def mailboxes(self) -> list[Mailbox[Any]]:
        """All mailboxes at which stages may wait."""
        return [box for stage in self._to for boxes in stage for box in boxes]

    def squares(self, stage: int, replica: int, gradients: list[Any]) -> tf.Tensor:
        """The squared norms of all stages' gradients, this replica's among them; waits for those of the others."""
        mine = self._stages[stage][replica]
        if replica == 0:
            square = mine.squared_norm(gradients)
            for boxes in self._to:
                for box in boxes:
                    box[stage].put(square)
        squares = [transfer(box.get(), mine.device) for box in self._to[stage][replica]]
        with tf.device(mine.device):
            return tf.stack(squares)
