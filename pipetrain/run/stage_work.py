"""One replica of one stage: what each operation takes, computes and sends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import tensorflow as tf

from pipetrain.compute.functions.inference import Replica
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_function import as_mean
from pipetrain.compute.functions.stage_values import (
    BackwardResult,
    BoundaryTensors,
    Forward,
    Inputs,
    Operands,
    SavedForBackward,
)
from pipetrain.compute.optimizer.gradient_scaling import LossScale
from pipetrain.run.channels import Channels, take
from pipetrain.run.collector import Microbatch, OutputReport
from pipetrain.run.control import Control
from pipetrain.run.stage_weights import StageId, StageUpdates, StageWeights
from pipetrain.schemes.actions import FROM_ABOVE, FROM_BELOW, Action
from pipetrain.schemes.scheme import Scheme
from pipetrain.trace.records import Transfers


class StageWork:
    """One replica of one stage, from one start of a pipeline to one drain.

    The device's thread calls ``receive`` and then ``perform`` for each of the stage's actions in the schedule's order,
    ``weight_gradients`` for those of W that follow each other; results go to the neighbouring stages and to the caller.

    Args:
        identity: which replica of which stage.
        stage: its functions and weights.
        scheme: which weights are read.
        microbatches: of a minibatch.
        channels: what comes in and goes out.
        control: where it reports.
        loss_scale: that of the first minibatch.

    ``carries_out`` are the operations that it has a method for, ``updates`` are what its backwards lead to.
    """

    carries_out: ClassVar[dict[str, str]] = {
        "F": "_forward",
        "B": "_backward",
        "I": "_input_gradients",
        "FB": "_forward_backward",
        "FI": "_forward_backward",
    }

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
        self.identity, self.device = identity, stage.device
        self._stage, self._channels, self._control, self._trains = stage, channels, control, scheme.trains
        self._weights = StageWeights(identity, stage, scheme, microbatches, channels.shared)
        self.updates = StageUpdates(
            identity, self._trained, self._weights, not scheme.asynchronous, channels, control, loss_scale
        )
        self._in_flight: dict[int, tuple[Microbatch, SavedForBackward | Operands | None]] = {}
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
        return self._weights.own.version

    def transfers(self) -> Transfers:
        """The recorded transfers: what was sent, and the sums with other replicas."""
        stage, _, replica, _ = self.identity
        sent = [self._channels.reduction.transfers(stage, replica)]
        if self._channels.below:
            sent.append(self._channels.below.transfers("F", stage, stage + 1))
        if self._channels.above:
            sent.append(self._channels.above.transfers("B", stage, stage - 1))
        return Transfers.joined([*sent, *(each.transfers(stage, replica) for each in self._channels.shared)])

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

    def catch_up(self) -> None:
        """After the last action: let all copies of shared weights be equal."""
        self._weights.catch_up()

    def _finish(self) -> None:
        """Wait for the device if exact times are wanted, before the clock is read and results are sent."""
        self._control.finish(self.device)

    def _forward(self, action: Action, microbatch: Microbatch) -> None:
        below = self._channels.below
        weights = self._weights.forward(microbatch.number)
        if self._stage.recompute and not self._weights.last(microbatch.number):
            weights = self._stage.weights(weights)
        result, output, loss = None, None, None
        if microbatch.values is not None:
            result = self._stage.forward(weights, *self._inputs(microbatch))
            output, loss = result.output, result.loss
        microbatch = self._passed(microbatch, result)
        if self._trains:
            self._in_flight[microbatch.number] = (microbatch, result and result.kept)
        if below:
            sent = self.identity.with_own_penalty(microbatch)
            self._finish()
            below.send(sent.with_values, output, microbatch.rows, microbatch.number)
            self._forwarded = microbatch.number
            self._close_if_done()
        else:
            self._control.report(
                OutputReport(self.identity.with_own_share(microbatch), self.identity.replica, loss, output)
            )

    def _backward(self, action: Action, returned: list[tf.Tensor] | None) -> None:
        microbatch, kept = self._in_flight.pop(action.microbatch)
        weights = self._weights.backward(microbatch.number)
        result = None if kept is None else self._run_backward(microbatch, weights, kept, returned)
        del weights, kept  # held by nobody, the variables' buffers are updated in place
        self._pass_on(microbatch, result)

    def _input_gradients(self, action: Action, returned: list[tf.Tensor] | None) -> None:
        """The first half of a backward; what the second one needs takes the place of the activations."""
        microbatch, kept = self._in_flight.pop(action.microbatch)
        weights = self._weights.backward(microbatch.number)
        result = None
        if kept is not None:
            result = self._run_first_half(microbatch, weights, cast(SavedForBackward, kept), returned)
        else:
            self._in_flight[action.microbatch] = microbatch, None
        self._send_up(microbatch, result)

    def weight_gradients(self, actions: Sequence[Action]) -> None:
        """The second halves of some backwards of one minibatch in one call, with the weights of the first ones."""
        halves = [self._in_flight.pop(action.microbatch) for action in actions]
        microbatch, _ = halves[-1]
        self._now = microbatch, (actions[-1],)
        weights = self._weights.backward(microbatch.number)
        packed = [each for _, kept in halves if isinstance(kept, Operands) for each in kept.packed]
        result = self._run_backward(microbatch, weights, Operands(packed), [], len(actions)) if packed else None
        del halves, weights, packed
        self._finish()
        self.updates.after_backward(microbatch, result is not None and result.updated, len(actions))

    def _forward_backward(self, action: Action, microbatch: Microbatch) -> float | None:
        """Forward and backward as one call, which reads the weights once; as two calls if they read different versions.

        Of the backward in halves it is the first half. Returns the time when the forward was finished, if known.
        """
        is_half = action.op == "FI"
        forward, backward = action._replace(op="F"), action._replace(op="I" if is_half else "B")
        self._now = microbatch, (forward,)
        if microbatch.values is None or not self._weights.last(microbatch.number):
            self._forward(forward, microbatch)
            middle_s = time.perf_counter()
            self._now = microbatch, (backward,)
            (self._input_gradients if is_half else self._backward)(backward, None)
            return middle_s
        weights = self._weights.forward(microbatch.number)
        self._weights.backward(microbatch.number)  # the same
        inputs = self._inputs(microbatch)
        self._now = microbatch, (forward, backward)
        runs = self._run_first_half if is_half else self._run_backward
        result = runs(microbatch, weights, inputs, None)
        del weights, inputs
        self._now = microbatch, (backward,)
        made = cast(Forward, result.forward)
        done = self.identity.with_own_share(self._passed(microbatch, made))
        self._control.report(OutputReport(done, self.identity.replica, made.loss, made.output))
        (self._send_up if is_half else self._pass_on)(microbatch, result)
        return result.forward_end_s

    def _passed(self, microbatch: Microbatch, result: Forward | None) -> Microbatch:
        """The microbatch after this stage's forward, with its layers' own losses."""
        if result is None or result.penalty is None:
            return microbatch.passed(None)
        return microbatch.passed(as_mean(result.penalty, self.identity.with_own_share(microbatch).share))

    def _inputs(self, microbatch: Microbatch) -> Inputs:
        last = self._channels.below is None
        targets = take(microbatch.targets, self.identity.rows(microbatch), microbatch.rows) if last else None
        return Inputs(cast(BoundaryTensors, microbatch.values), targets)

    def _run_backward(
        self,
        microbatch: Microbatch,
        weights: Any,
        given: SavedForBackward | Inputs | Operands,
        returned: list[tf.Tensor] | None,
        count: int = 1,
    ) -> BackwardResult:
        """The stage's backward, with sum and update in the same call where possible; remaining gradients are kept.

        ``count``: of how many microbatches, this one being the last.
        """
        mine, scale = self.identity.with_own_share(microbatch), self.updates.loss_scale.scale
        output_gradients = [mine.loss_share * scale] if returned is None else returned
        step = self.updates.begun_with(microbatch, not isinstance(given, Operands), count)
        total = self.updates.taken()
        result = self._trained.backward(weights, given, output_gradients, mine.share * scale, total, step, scale)
        self.updates.gather(result.gradients)
        return result

    def _run_first_half(
        self, microbatch: Microbatch, weights: Any, given: SavedForBackward | Inputs, returned: list[tf.Tensor] | None
    ) -> BackwardResult:
        """The first half of the stage's backward; what the second half needs is kept."""
        mine, scale = self.identity.with_own_share(microbatch), self.updates.loss_scale.scale
        gradients = [mine.loss_share * scale] if returned is None else returned
        result, operands = self._trained.input_gradients(weights, given, gradients, mine.share * scale, scale)
        self._in_flight[microbatch.number] = microbatch.passed(None), operands
        return result

    def _pass_on(self, microbatch: Microbatch, result: BackwardResult | None) -> None:
        """Send the inputs' gradients up; after the minibatch's last microbatch begin the update."""
        self._send_up(microbatch, result)
        self.updates.after_backward(microbatch, result is not None and result.updated)

    def _send_up(self, microbatch: Microbatch, result: BackwardResult | None) -> None:
        self._finish()
        if self._channels.above:
            by_input = None if result is None else result.by_input
            self._channels.above.send(lambda values: values, by_input, microbatch.rows, microbatch.number)

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
