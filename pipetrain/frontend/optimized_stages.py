"""The stages of one compilation, with what their optimizers gather."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.optimizer.adoption import adopt
from pipetrain.compute.optimizer.loss_scaling import build_scale, stepping
from pipetrain.compute.optimizer.slots import Slot


class OptimizedStages:
    """Every stage's replicas, and the optimizers at work in them.

    Args:
        stages: the replicas of every stage in order.
        weights: all that the stages train, in the model's order.
    """

    def __init__(self, stages: Sequence[list[Stage]] = (), weights: Sequence[keras.Variable] = ()) -> None:
        self.replicas, self._weights = list(stages), weights
        self._parts = [part for replicas in self.replicas for stage in replicas for part in stage.parts()]

    @property
    def first(self) -> list[Stage]:
        """The first replica of every stage."""
        return [stage for stage, *_ in self.replicas]

    def traced(self) -> None:
        """Let every stage know which weights gradients reach in all of them."""
        reached = [variable for stage in self.first for variable in stage.reached]
        for stage in (stage for replicas in self.replicas for stage in replicas):
            stage.learn_reached(reached)

    def adopt_from(self, optimizer: keras.optimizers.Optimizer) -> None:
        """What has been set in the compiled optimizer since it was at work, the stages take over; see ``adopt``."""
        adopt(stepping(optimizer), self._weights, self._parts)
        build_scale(optimizer, self._weights)

    def go_on_from(self, others: OptimizedStages) -> None:
        """Take over the slots of others, for weights that both train."""
        gathered = {(id(slot.weight), slot.kind): slot.variable for slot in others.slots()}
        for slot in self.slots():
            if (id(slot.weight), slot.kind) in gathered:  # else its layer was frozen
                slot.variable.assign(gathered[id(slot.weight), slot.kind])

    def slots(self) -> Iterator[Slot]:
        """What all optimizers have gathered, by the model's own variables."""
        return (slot for replicas in self.replicas for stage in replicas for slot in stage.slots())

    def shared(self) -> Iterator[list[Any]]:
        """What each optimizer has gathered that is of no single weight."""
        return (part.shared for part in self._parts)
