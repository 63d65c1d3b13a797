"""The updates of a stage's weights: a minibatch's gradients are gathered, completed and applied."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import Step
from pipetrain.compute.optimizer.loss_scaling import LossScale
from pipetrain.run.channels import Channels
from pipetrain.run.control import Control
from pipetrain.run.messages import Microbatch, UpdateReport
from pipetrain.run.stage_id import StageId
from pipetrain.run.stage_weights import StageWeights
from pipetrain.schemes.weight_versions import WeightVersions


class StageUpdates:
    """What one replica of a stage makes of its weights' gradients, from one start of a pipeline to one drain.

    Each backward takes what is ``gathered`` and leaves the sum with its own gradients. After a minibatch's last
    backward the sum is completed by those of other replicas and stages, and applied. If a device's stages update
    together, the sum is held until ``complete`` and ``finish`` are called; if they depend on nothing else, the
    backward's call makes the update of the stage's own weights itself.

    Args:
        identity: which replica of which stage.
        stage: its functions.
        weights: those that are read, of which versions are kept before an update.
        is_synchronous: whether the scheme is.
        channels: what the replica exchanges with other replicas and stages.
        control: where it reports.
        loss_scale: that of the first minibatch.

    ``loss_scale`` is that of the minibatch whose backward comes next.
    """

    def __init__(
        self,
        identity: StageId,
        stage: Stage,
        weights: StageWeights,
        is_synchronous: bool,
        channels: Channels,
        control: Control,
        loss_scale: LossScale,
    ) -> None:
        self._identity, self._stage, self._weights, self._is_synchronous = identity, stage, weights, is_synchronous
        self._channels, self._control, self.loss_scale = channels, control, loss_scale
        self._gathered: list[Any] | None = None
        self._backwards = 0  # of the minibatch, those whose gradients are gathered
        self._complete: tuple[Microbatch, list[Any]] | None = None

    def begun_with(self, microbatch: Microbatch, sends: bool = True, count: int = 1) -> Step | None:
        """The step that the call of this backward is to make too; None where the update is made later.

        ``sends``: whether it makes gradients that the stage above waits for; ``count``: of how many microbatches it
        makes the weights' gradients, this one being the last.

        The call makes it if the minibatch's gradients are complete with this one's, and nobody waits for anything else
        first. Other replicas and stages need gradients, and in a synchronous scheme the stage above, which is idle, its
        own. With one microbatch it is not sent them first: the gradients of all weights would be in memory at once.
        """
        alone = self._identity.replicas == 1 and not self._channels.together
        awaited = sends and self._is_synchronous and self._channels.above is not None and len(microbatch.group) > 1
        if alone and not awaited and self._completes(microbatch, count) and self._stage.variables:
            return self._begin(microbatch)
        return None

    def taken(self) -> Any:
        """The gradients gathered so far, which are then no longer held here."""
        gradients, self._gathered = self._gathered, None
        return gradients

    def gather(self, gradients: list[Any]) -> None:
        """Hold the gradients that a backward has left."""
        self._gathered = gradients

    def after_backward(self, microbatch: Microbatch, is_made: bool, count: int = 1) -> None:
        """Update after the minibatch's last backward; ``is_made``: its call has updated the stage's own weights.

        The call has made the weights' gradients of ``count`` microbatches.
        """
        completes = self._completes(microbatch, count)
        self._backwards = 0 if completes else self._backwards + count
        if is_made:
            self._update_shared(microbatch, self._summed_over_stages(microbatch, self.taken()))
            self._report()
        elif completes:
            self._flush(microbatch)

    @property
    def are_awaited(self) -> bool:
        """Whether all gradients of a minibatch are there, and ``complete`` and ``finish`` are to be called."""
        return self._complete is not None

    def complete(self) -> None:
        """Add those of other stages to the gradients, and tell all stages of them."""
        assert self._complete is not None
        microbatch, gradients = self._complete
        gradients = self._summed_over_stages(microbatch, gradients)
        if self._channels.summaries:
            stage, _, replica, _ = self._identity
            self._channels.summaries.send(stage, replica, gradients, self._step(microbatch, self._weights.own))
        self._complete = microbatch, gradients

    def finish(self) -> None:
        """Update by the complete gradients, or skip the step; waits for what all stages tell of theirs."""
        assert self._complete is not None
        finite, squares = True, None
        if self._channels.summaries:
            finite, squares = self._channels.summaries.receive(self._identity.stage, self._identity.replica)
        (microbatch, gradients), self._complete = self._complete, None
        self._update(microbatch, gradients, squares, finite)

    def _completes(self, microbatch: Microbatch, count: int) -> bool:
        """Whether only so many weight gradients are missing of its minibatch's, see ``actions.completes``."""
        return self._backwards + count == len(microbatch.group)

    def _flush(self, microbatch: Microbatch) -> None:
        """Complete the minibatch's gradients and update, unless the device's stages do so together."""
        gradients = self._channels.reduction.sum(self._identity.replica, self.taken(), microbatch.number)
        if self._channels.together:
            self._complete = microbatch, gradients
        else:
            self._update(microbatch, self._summed_over_stages(microbatch, gradients))

    def _summed_over_stages(self, microbatch: Microbatch, gradients: list[Any]) -> list[Any]:
        """The gradients, those of shared weights summed over the stages; None for what an earlier stage completes."""
        if not self._weights.shared:
            return gradients
        gradients = list(gradients)
        for each in self._weights.shared:
            each.sum(gradients, microbatch.number)
        return gradients

    def _update(
        self, microbatch: Microbatch, gradients: list[Any], squares: tf.Tensor | None = None, finite: bool = True
    ) -> None:
        """Make the next version of the weights, equal to this one if not all gradients are finite."""
        step = self._begin(microbatch)
        if finite:
            self._stage.update(gradients, step, squares)
        self._update_shared(microbatch, gradients if finite else None, squares)
        self.loss_scale = self.loss_scale.after(finite)
        self._report()

    def _update_shared(
        self, microbatch: Microbatch, gradients: list[Any] | None, squares: tf.Tensor | None = None
    ) -> None:
        """Update the shared weights whose gradients are complete here; None skips the step."""
        for each in self._weights.shared:
            if each.are_completed_here:
                each.update(gradients, self._step(microbatch, each.versions), squares, microbatch.number)

    def _begin(self, microbatch: Microbatch) -> Step:
        """Keep the versions of the stage's own weights that are still read."""
        step = self._step(microbatch, self._weights.own)
        self._weights.own.before_update()
        return step

    def _step(self, microbatch: Microbatch, versions: WeightVersions) -> Step:
        return Step(microbatch.learning_rate, versions.staleness(microbatch.number), self.loss_scale.scale)

    def _report(self) -> None:
        """Tell the caller of the update, with the weights where they are wanted."""
        stage, _, replica, _ = self._identity
        version = self._weights.own.version
        wanted = replica == 0 and self._control.wants_snapshot(version)
        snapshot = self._stage.snapshot() if wanted else None
        if self._is_synchronous or wanted:  # else nobody waits for it, and waking the caller costs
            self._control.report(UpdateReport(stage, replica, version, snapshot))
