"""One replica of one stage: what each operation computes, reads, sends and updates."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import tensorflow as tf

from pipetrain.compute.functions.inference import Replica
from pipetrain.compute.functions.penalties import as_mean
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import (
    BackwardResult,
    BoundaryTensors,
    Forward,
    Inputs,
    SavedForBackward,
    Step,
)
from pipetrain.compute.functions.weight_binding import Newest, OfGroups
from pipetrain.compute.functions.weight_group import WeightGroup
from pipetrain.compute.optimizer.loss_scaling import LossScale
from pipetrain.run.channels import Channels, take
from pipetrain.run.control import Control
from pipetrain.run.messages import Microbatch, Output, Updated
from pipetrain.run.shared_gradients import Completed, SharedGradients
from pipetrain.schemes.actions import OPERATIONS, Action
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.splitting import rows_of
from pipetrain.schemes.weight_versions import WeightVersions
from pipetrain.trace.trace import Transfer


class StageId(NamedTuple):
    """Which replica of which stage this is, and of how many."""

    stage: int
    stages: int
    replica: int
    replicas: int

    def __str__(self) -> str:
        return f"stage {self.stage}" + (f", replica {self.replica}" if self.replicas > 1 else "")


class SharedWork(NamedTuple):
    """Weights that the stage shares: the copies, what is exchanged with the other stages, and the copies' versions."""

    group: WeightGroup
    exchange: SharedGradients
    versions: WeightVersions


FROM_ABOVE = frozenset(op for op, operation in OPERATIONS.items() if "outputs" in operation.received)
FROM_BELOW = frozenset(op for op, operation in OPERATIONS.items() if "input gradients" in operation.received)


def _kept(group: WeightGroup, ahead: float) -> list[tf.Tensor]:
    return group.weights(Newest(ahead))


class StageWork:
    """One replica of one stage, from one start of a pipeline to one drain.

    The device's thread calls ``receive`` and then ``perform`` for each of the stage's actions in the schedule's order;
    results go to the neighbouring stages and to the caller.

    Args:
        identity: which replica of which stage.
        stage: its functions and weights.
        scheme: which weights are read.
        microbatches: of a minibatch.
        channels: what comes in and goes out.
        control: where it reports.
        loss_scale: that of the first minibatch.

    ``carries_out`` are the operations that it has a method for, ``loss_scale`` is that of the minibatch whose backward
    comes next.
    """

    carries_out: ClassVar[dict[str, str]] = {"F": "_forward", "B": "_backward", "FB": "_forward_backward"}

    def __init__(
        self,
        identity: StageId,
        stage: Replica,
        scheme: Scheme,
        microbatches: int,
        channels: Channels,
        control: Control,
        loss_scale: LossScale = LossScale(),  # noqa: B008 - a tuple, never changed
    ) -> None:
        self.identity, self.device, self.loss_scale = identity, stage.device, loss_scale
        self.most_in_flight = 0
        self._stage, self._channels, self._control = stage, channels, control
        self._synchronous, self._trains = not scheme.asynchronous, scheme.trains
        place = scheme, *identity[:2], microbatches, Newest
        self._versions = WeightVersions(*place, lambda ahead: stage.weights(Newest(ahead)))
        self._sharing = [
            SharedWork(group, each, WeightVersions(*place, partial(_kept, group), each.first))
            for group, each in zip(stage.shared, channels.shared, strict=True)
        ]
        self._in_flight: dict[int, tuple[Microbatch, SavedForBackward | None]] = {}
        self._gradients: list[Any] | None = None
        self._complete: tuple[Microbatch, list[Any]] | None = None
        self._completed = 0  # of the minibatch, the microbatches whose weight gradients are there
        self._last: int | None = None  # the last microbatch of all, once that is known
        self._forwarded = -1  # the last one that has gone forward
        self._now: tuple[Microbatch, tuple[Action, ...]] | None = None

    @property
    def _trained(self) -> Stage:
        """The stage as one that has a backward; used only where the scheme trains."""
        return cast(Stage, self._stage)

    @property
    def version(self) -> int:
        """The version of the weights: updates made since the start."""
        return self._versions.version

    def transfers(self) -> Iterator[Transfer]:
        """The recorded transfers: what was sent, and the sums with other replicas."""
        stage, _, replica, _ = self.identity
        if self._channels.below:
            yield from self._channels.below.transfers("F", stage, stage + 1)
        if self._channels.above:
            yield from self._channels.above.transfers("B", stage, stage - 1)
        yield from self._channels.reduction.transfers(stage, replica)
        for each in self._channels.shared:
            yield from each.transfers(stage, replica)

    def arriving(self) -> Microbatch | None:
        """The next microbatch, left in place; None when no more will come. Waits for it."""
        return self._channels.inbox.peek()

    def ends_after(self, microbatch: int) -> None:
        """No microbatches come after this one; the stage below is told after it has received the last one."""
        self._last = microbatch
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._channels.below and self._last is not None and self._forwarded >= self._last:
            self._channels.below.close()
            self._last = None

    def receive(self, action: Action) -> Any:
        """Wait for what the action needs of other stages: a microbatch, or the gradients of what was sent."""
        if action.op in FROM_ABOVE:
            return self._channels.inbox.get()
        return self._channels.returns.get() if self._channels.below and action.op in FROM_BELOW else None

    def perform(self, action: Action, received: Any) -> float | None:
        """Execute the action; for FB returns the time when the forward was finished, if known."""
        microbatch = received if action.op in FROM_ABOVE else self._in_flight[action.microbatch][0]
        self._now = microbatch, (action,)
        if microbatch.number != action.microbatch:
            raise RuntimeError(f"Microbatch {microbatch.number} has come where the order has {action}.")
        middle_s: float | None = getattr(self, self.carries_out[action.op])(action, received)
        self._finish()
        return middle_s

    def _finish(self) -> None:
        """Wait for the device if exact times are wanted, before the clock is read and results are sent."""
        self._control.finish(self.device)

    def _forward(self, action: Action, microbatch: Microbatch) -> None:
        below = self._channels.below
        weights = self._weights_of("F", microbatch.number)
        if self._stage.recompute and not self._lasts(microbatch.number):
            weights = self._stage.weights(weights)
        result, output, loss = None, None, None
        if microbatch.values is not None:
            result = self._stage.forward(weights, *self._inputs(microbatch))
            output, loss = result.output, result.loss
        microbatch = self._passed(microbatch, result)
        if self._trains:
            self._in_flight[microbatch.number] = (microbatch, result and result.kept)
            self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        if below:
            sent = self._with_part_of_penalty(microbatch)
            self._finish()
            below.send(sent.with_values, output, microbatch.rows, microbatch.number)
            self._forwarded = microbatch.number
            self._close_if_done()
        else:
            self._control.report(Output(self._shared(microbatch), self.identity.replica, loss, output))

    def _backward(self, action: Action, returned: list[tf.Tensor] | None) -> None:
        microbatch, kept = self._in_flight.pop(action.microbatch)
        weights = self._weights_of("B", microbatch.number)
        result = None if kept is None else self._run_backward(microbatch, weights, kept, returned)
        del weights, kept  # held by nobody, the variables' buffers are updated in place
        self._pass_on(microbatch, result)

    def _forward_backward(self, action: Action, microbatch: Microbatch) -> float | None:
        """Forward and backward as one call, which reads the weights once; as two calls if they read different versions.

        Returns the time when the forward was finished, if known.
        """
        forward, backward = action._replace(op="F"), action._replace(op="B")
        self._now = microbatch, (forward,)
        if microbatch.values is None or not self._lasts(microbatch.number):
            self._forward(forward, microbatch)
            middle_s = time.perf_counter()
            self._now = microbatch, (backward,)
            self._backward(backward, None)
            return middle_s
        weights = self._weights_of("F", microbatch.number)
        self._weights_of("B", microbatch.number)  # the same
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight) + 1)
        inputs = self._inputs(microbatch)
        self._now = microbatch, (forward, backward)
        result = self._run_backward(microbatch, weights, inputs, None)
        del weights, inputs
        self._now = microbatch, (backward,)
        made = cast(Forward, result.forward)
        done = self._shared(self._passed(microbatch, made))
        self._control.report(Output(done, self.identity.replica, made.loss, made.output))
        self._pass_on(microbatch, result)
        return result.forward_end_s

    def _passed(self, microbatch: Microbatch, result: Forward | None) -> Microbatch:
        """The microbatch after this stage's forward, with its layers' own losses."""
        if result is None or result.penalty is None:
            return microbatch.passed(None)
        return microbatch.passed(as_mean(result.penalty, self._shared(microbatch).share))

    def _inputs(self, microbatch: Microbatch) -> Inputs:
        last = self._channels.below is None
        targets = take(microbatch.targets, self._mine(microbatch), microbatch.rows) if last else None
        return Inputs(cast(BoundaryTensors, microbatch.values), targets)

    def _run_backward(
        self, microbatch: Microbatch, weights: Any, given: SavedForBackward | Inputs, returned: list[tf.Tensor] | None
    ) -> BackwardResult:
        """The stage's backward, with sum and update in the same call where possible; remaining gradients are kept."""
        mine, scale = self._shared(microbatch), self.loss_scale.scale
        output_gradients = [mine.loss_share * scale] if returned is None else returned
        step = self._begin_update(microbatch) if self._updates_by(microbatch) else None
        total, self._gradients = self._gradients, None
        result = self._trained.backward(weights, given, output_gradients, mine.share, total, step, scale)
        self._gradients = result.gradients
        return result

    def _pass_on(self, microbatch: Microbatch, result: BackwardResult | None) -> None:
        """Send the inputs' gradients up; after the minibatch's last microbatch begin the update."""
        self._finish()
        self._completed = 0 if self._is_last(microbatch) else self._completed + 1
        if self._channels.above:
            by_input = None if result is None else result.by_input
            self._channels.above.send(lambda values: values, by_input, microbatch.rows, microbatch.number)
        if result is not None and result.updated:
            self._update_shared(microbatch, self._summed_over_stages(microbatch, self._taken()))
            self._updated()
        elif not self._completed:
            self._flush(microbatch)

    def _updates_by(self, microbatch: Microbatch) -> bool:
        """Whether the minibatch's gradients are complete with this one's, and nobody waits for anything else first.

        Other replicas and stages need gradients, and in a synchronous scheme the stage above, which is idle, its own.
        With one microbatch it is not sent them first: the gradients of all weights would be in memory at once.
        """
        alone = self.identity.replicas == 1 and self._channels.summaries is None
        awaited = self._synchronous and self._channels.above is not None and len(microbatch.group) > 1
        return alone and not awaited and self._is_last(microbatch) and bool(self._stage.variables)

    def _is_last(self, microbatch: Microbatch) -> bool:
        """Whether only this one's weight gradients are missing of its minibatch's, see ``actions.completes``."""
        return self._completed + 1 == len(microbatch.group)

    def _begin_update(self, microbatch: Microbatch) -> Step:
        """Keep the weight versions that are still read."""
        step = self._step(microbatch, self._versions)
        self._versions.before_update()
        return step

    def _step(self, microbatch: Microbatch, versions: WeightVersions) -> Step:
        return Step(microbatch.learning_rate, versions.staleness(microbatch.number), self.loss_scale.scale)

    def _flush(self, microbatch: Microbatch) -> None:
        """Complete the minibatch's gradients, and update unless that depends on those of all stages."""
        stage, _, replica, _ = self.identity
        gradients = self._channels.reduction.sum(replica, self._taken(), microbatch.number)
        gradients = self._summed_over_stages(microbatch, gradients)
        if self._channels.summaries:
            self._channels.summaries.send(stage, replica, gradients, self._step(microbatch, self._versions))
            self._complete = microbatch, gradients
        else:
            self._update(microbatch, gradients)

    @property
    def awaits_update(self) -> bool:
        """Whether the gradients of a minibatch are complete, and ``update`` is to be called."""
        return self._complete is not None

    def update(self) -> None:
        """Update by the complete gradients, or skip the step; waits for what all stages tell of theirs."""
        stage, _, replica, _ = self.identity
        assert self._channels.summaries is not None and self._complete is not None
        finite, squares = self._channels.summaries.receive(stage, replica)
        (microbatch, gradients), self._complete = self._complete, None
        self._update(microbatch, gradients, squares, finite)

    def _update(
        self, microbatch: Microbatch, gradients: list[Any], squares: tf.Tensor | None = None, finite: bool = True
    ) -> None:
        """Make the next version of the weights, equal to this one if not all gradients are finite."""
        step = self._begin_update(microbatch)
        if finite:
            self._trained.update(gradients, step, squares)
        self._update_shared(microbatch, gradients, squares, finite)
        self.loss_scale = self.loss_scale.after(finite)
        self._updated()

    def _taken(self) -> Any:
        """The gradients gathered so far, which are then no longer held here."""
        gradients, self._gradients = self._gradients, None
        return gradients

    def _summed_over_stages(self, microbatch: Microbatch, gradients: list[Any]) -> list[Any]:
        """The gradients, those of shared weights summed over the stages; None for what an earlier stage completes."""
        if not self._sharing:
            return gradients
        gradients = list(gradients)
        for group, exchange, _ in self._sharing:
            mine = [gradients[n] for n in group.numbers]
            total = exchange.sum(self.identity.stage, self.identity.replica, mine, microbatch.number)
            for place, n in enumerate(group.numbers):
                gradients[n] = total and total[place]
        return gradients

    def _update_shared(
        self, microbatch: Microbatch, gradients: list[Any], squares: tf.Tensor | None = None, finite: bool = True
    ) -> None:
        """Update the shared weights whose gradients are complete here, and send these to the other stages.

        They are clipped if the ``squares`` of all stages' gradients are given; if not all gradients are finite, there
        are none.
        """
        for group, exchange, versions in self._sharing:
            if exchange.first == self.identity.stage:
                step = self._step(microbatch, versions)
                mine = [gradients[n] for n in group.numbers] if finite else []
                completed = Completed(self._trained.prepared(mine, step, squares), step)
                exchange.hand_down(self.identity.replica, completed, microbatch.number)
                versions.before_update()
                if completed.gradients:
                    group.apply(*completed)

    def _catch_up(self, each: SharedWork, version: int) -> None:
        """Make the updates of shared weights up to a version, which another stage completes; waits for it."""
        while each.versions.version < version:
            completed = each.exchange.completed(self.identity.stage, self.identity.replica)
            each.versions.before_update()
            if completed.gradients:
                each.group.apply(*completed)

    def catch_up(self) -> None:
        """After the last action: let all copies of shared weights be equal."""
        for each in self._sharing:
            self._catch_up(each, self._versions.version)

    def _weights_of(self, op: str, microbatch: int) -> Any:
        """The weights of F(microbatch) or B(microbatch), of shared ones the copies brought to the version found."""
        read = WeightVersions.forward if op == "F" else WeightVersions.backward
        if not self._sharing:
            return read(self._versions, microbatch)
        for each in self._sharing:
            self._catch_up(each, each.versions.found(microbatch, backward=op == "B"))
        return OfGroups(tuple(read(each, microbatch) for each in self._all_versions))

    def _lasts(self, microbatch: int) -> bool:
        """Whether the backward reads the same weights as the forward."""
        return not self._trained.changed and all(each.lasts(microbatch) for each in self._all_versions)

    @property
    def _all_versions(self) -> list[WeightVersions]:
        return [self._versions, *(each.versions for each in self._sharing)]

    def _updated(self) -> None:
        stage, _, replica, _ = self.identity
        version = self._versions.version
        wanted = replica == 0 and self._control.wants_snapshot(version)
        snapshot = self._trained.snapshot() if wanted else None
        if self._synchronous or wanted:  # else nobody waits for it, and waking the caller costs
            self._control.report(Updated(stage, replica, version, snapshot))

    def _mine(self, microbatch: Microbatch) -> range:
        return rows_of(microbatch.rows, self.identity.replica, self.identity.replicas)

    def _shared(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with the share of the minibatch that this replica's rows are."""
        if self.identity.replicas == 1:
            return microbatch
        return microbatch._replace(share=microbatch.share * self._fraction(microbatch))

    def _fraction(self, microbatch: Microbatch) -> float:
        """This replica's share of the microbatch's rows."""
        return len(self._mine(microbatch)) / microbatch.rows if microbatch.rows else 1 / self.identity.replicas

    def _with_part_of_penalty(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with what this replica contributes to the penalty of all replicas' rows."""
        if microbatch.penalty is None or self.identity.replicas == 1:
            return microbatch
        return microbatch._replace(penalty=microbatch.penalty * self._fraction(microbatch))

    def doing(self) -> str:
        """What this stage was doing, as text for an error message."""
        if self._now is None:
            return f"{self.identity} before its first action."
        microbatch, actions = self._now
        if len(actions) > 1 and (had_run := self._trained.had_run()) is not None:
            actions = (actions[had_run],)
        kind = " or ".join(action.operation.about for action in actions)
        which = f"minibatch {microbatch.minibatch}"
        if len(microbatch.group) > 1:
            which += f", microbatch {microbatch.number - microbatch.group[0]}"
        names = " or ".join(map(str, actions))
        return f"{self.identity}, {kind} of {which} (action {names})."
