"""A stage's copy of weights that other stages have too: their gradients' sums, their updates and their versions."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import Step
from pipetrain.compute.functions.weight_binding import Newest
from pipetrain.compute.functions.weight_group import WeightGroup
from pipetrain.run.shared_gradients import SharedGradients, SharedUpdate
from pipetrain.run.stage_id import StageId
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.weight_versions import WeightVersions


class SharedWeights:
    """One replica's copy of weights that the same other stages have, from one start of a pipeline to one drain.

    Every copy makes the same updates, by gradients that are summed over the stages. The first stage completes a sum,
    updates its copy and hands the sum down; each other stage updates its copy when an action of its own finds that
    version.

    Args:
        identity: which replica of which stage.
        stage: its functions.
        group: the copy.
        exchange: what the stages that have these weights send each other.
        place: scheme, stage, stages and microbatches, by which versions are read.

    ``versions`` are those of this copy.
    """

    def __init__(
        self,
        identity: StageId,
        stage: Stage,
        group: WeightGroup,
        exchange: SharedGradients,
        place: tuple[Scheme, int, int, int],
    ) -> None:
        self._identity, self._stage, self._group, self._exchange = identity, stage, group, exchange
        self.versions = WeightVersions(*place, Newest, lambda ahead: group.weights(Newest(ahead)), exchange.first)

    @property
    def are_completed_here(self) -> bool:
        """Whether this stage is the first that has them, at which the sums of their gradients are complete."""
        return self._exchange.first == self._identity.stage

    def sum(self, gradients: list[Any], microbatch: int) -> None:
        """Add the other stages' gradients to this one's, in their place; None for what an earlier stage completes."""
        mine = [gradients[n] for n in self._group.numbers]
        total = self._exchange.sum(self._identity.stage, self._identity.replica, mine, microbatch)
        for place, n in enumerate(self._group.numbers):
            gradients[n] = total and total[place]

    def update(self, gradients: list[Any] | None, step: Step, squares: tf.Tensor | None, microbatch: int) -> None:
        """Update by gradients that are complete here, and send these to the other stages; None skips the step.

        They are clipped if the ``squares`` of all stages' gradients are given.
        """
        mine = [] if gradients is None else [gradients[n] for n in self._group.numbers]
        completed = SharedUpdate(self._stage.prepared(mine, step, squares), step)
        self._exchange.hand_down(self._identity.replica, completed, microbatch)
        self._apply(completed)

    def catch_up(self, version: int) -> None:
        """Make the updates up to a version, whose gradients another stage completes; waits for them."""
        while self.versions.version < version:
            self._apply(self._exchange.completed(self._identity.stage, self._identity.replica))

    def _apply(self, completed: SharedUpdate) -> None:
        self.versions.before_update()
        if completed.gradients:
            self._group.apply(*completed)
