"""A stage's weights: those that its actions read, its copies of shared ones, and their updates by gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from pipetrain.compute.functions.inference import Replica
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import Step
from pipetrain.compute.functions.weight_binding import Newest, OfGroups
from pipetrain.compute.functions.weight_groups import WeightGroup
from pipetrain.compute.optimizer.gradient_scaling import LossScale
from pipetrain.compute.program.stage_trace import StagePlace
from pipetrain.run.channels import Channels
from pipetrain.run.collector import Microbatch, UpdateReport
from pipetrain.run.control import Control
from pipetrain.run.gradient_exchange import SharedGradients, SharedUpdate
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.splitting import rows_of
from pipetrain.schemes.weight_versions import WeightVersions


class StageId(StagePlace):
    """A place of a pipeline, and what it has of each microbatch."""

    def rows(self, microbatch: Microbatch) -> range:
        """Its rows of the microbatch."""
        return rows_of(microbatch.rows, self.replica, self.replicas)

    def with_own_share(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with the share of the minibatch that this replica's rows are."""
        if self.replicas == 1:
            return microbatch
        return microbatch._replace(share=microbatch.share * self._fraction(microbatch))

    def with_own_penalty(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with what this replica contributes to the penalty of all replicas' rows."""
        if microbatch.penalty is None or self.replicas == 1:
            return microbatch
        return microbatch._replace(penalty=microbatch.penalty * self._fraction(microbatch))

    def _fraction(self, microbatch: Microbatch) -> float:
        """Its share of the microbatch's rows."""
        return len(self.rows(microbatch)) / microbatch.rows if microbatch.rows else 1 / self.replicas


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


class StageWeights:
    """What the forwards and backwards of one replica of a stage read, from one start of a pipeline to one drain.

    Args:
        identity: which replica of which stage.
        stage: its functions and weights.
        scheme: which versions are read.
        microbatches: of a minibatch.
        exchanges: for each group of weights that the stage shares, what the stages send each other.

    ``own`` are the versions of the stage's own weights, ``shared`` its copies of weights that others have too.
    """

    def __init__(
        self,
        identity: StageId,
        stage: Replica,
        scheme: Scheme,
        microbatches: int,
        exchanges: Sequence[SharedGradients],
    ) -> None:
        self._stage = cast(Stage, stage)  # one that trains, where its weights change
        place = scheme, identity.stage, identity.stages, microbatches
        self.own = WeightVersions(*place, Newest, lambda ahead: stage.weights(Newest(ahead)))
        self.shared = [
            SharedWeights(identity, self._stage, group, exchange, place)
            for group, exchange in zip(stage.shared, exchanges, strict=True)
        ]
        self._versions = [self.own, *(each.versions for each in self.shared)]

    def forward(self, microbatch: int) -> Any:
        """The weights of F(microbatch); waits for updates of shared weights that it finds."""
        return self._read(WeightVersions.forward, microbatch, backward=False)

    def backward(self, microbatch: int) -> Any:
        """The weights of B(microbatch); waits for updates of shared weights that it finds."""
        return self._read(WeightVersions.backward, microbatch, backward=True)

    def last(self, microbatch: int) -> bool:
        """Whether B(microbatch) reads the same weights as F(microbatch)."""
        return not self._stage.changed and all(each.lasts(microbatch) for each in self._versions)

    def catch_up(self) -> None:
        """After the last action: let all copies of shared weights be equal."""
        for each in self.shared:
            each.catch_up(self.own.version)

    def _read(self, read: Callable[[WeightVersions, int], Any], microbatch: int, backward: bool) -> Any:
        if not self.shared:
            return read(self.own, microbatch)
        for each in self.shared:
            each.catch_up(each.versions.found(microbatch, backward))
        return OfGroups(tuple(read(each, microbatch) for each in self._versions))


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
