"""The norm of all stages' gradients, for clipping by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.functions.stage import Stage
from pipetrain.run.mailbox import Mailbox
from pipetrain.run.transfers import transfer


class GlobalNorm:
    """At a flush every stage tells all others the squared norm of its gradients: one number to each.

    They are taken in the order of stages, whoever comes first. Replicas of a stage have equal gradients, of which the
    first measures the norm for all: so they stay bitwise equal whatever their devices are.

    Nobody waits for ever: a stage tells its number when it has sent on all that others need of the minibatch, and in a
    synchronous schedule nothing that leads there comes after the update. In an asynchronous one all stages would rest
    until the first is done.

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
        """All that stages may wait at."""
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
