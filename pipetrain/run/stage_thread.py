"""The thread of one stage: walks the stage's order of actions, waiting for each action's inputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.cores import finish, pin
from pipetrain.compute.functions.inference import Replica
from pipetrain.compute.functions.penalties import as_mean
from pipetrain.compute.functions.stage import BackwardResult, Forward, Inputs, SavedForBackward, Step
from pipetrain.compute.functions.weight_binding import Newest
from pipetrain.run.channels import Receiver, Sender, rows_of, take
from pipetrain.run.global_norm import GlobalNorm
from pipetrain.run.mailbox import Closed
from pipetrain.run.messages import Microbatch, Output, Updated
from pipetrain.run.reduction import Reduction
from pipetrain.schemes.actions import Action
from pipetrain.schemes.table import Scheme
from pipetrain.schemes.weight_versions import WeightVersions
from pipetrain.trace.trace import Span, Transfer

STARTS_S = 5.0  # a thread that has not begun so long after it was asked to never will


class StageId(NamedTuple):
    """Which replica of which stage a worker is, and of how many."""

    stage: int
    stages: int
    replica: int
    replicas: int


class Channels(NamedTuple):
    """What comes in and goes out: microbatches into ``inbox``, gradients into ``returns``; None past the ends.

    A None in the inbox says that no more microbatches will come. ``reduction`` joins the stage's replicas,
    ``norm`` all stages where gradients are clipped by the norm of all.
    """

    inbox: Receiver[Microbatch]
    returns: Receiver[list[tf.Tensor] | None]
    above: Sender | None
    below: Sender | None
    reduction: Reduction
    norm: GlobalNorm | None = None


class Control:
    """What the workers share: where they report, and the switch that pauses them.

    ``waits`` says whether they wait for GPUs, so that spans and transfers have the times of completion.
    """

    def __init__(
        self,
        report: Callable[[Output | Updated], None],
        fail: Callable[[BaseException, str], None],
        wants_snapshot: Callable[[int], bool],
        waits: bool = False,
    ) -> None:
        self.report, self.fail, self.wants_snapshot, self.waits = report, fail, wants_snapshot, waits
        self.running = threading.Event()
        self.running.set()

    def rest(self) -> None:
        """Wait while the workers are to rest."""
        if not self.running.is_set():  # waiting would take the event's lock, which all share
            self.running.wait()


class StageThread(threading.Thread):
    """One replica of one stage of a pipeline, from one start to one drain."""

    def __init__(self, seat: StageId, stage: Replica, scheme: Scheme, doors: Channels, control: Control) -> None:
        name = f"pipetrain stage {seat.stage}" + (f", replica {seat.replica}" if seat.replicas > 1 else "")
        super().__init__(name=name, daemon=True)
        self.spans: list[Span] = []
        self.busy_s, self.most_in_flight = 0.0, 0
        self._seat, self._stage = seat, stage
        self._schedule, self._doors, self._control = scheme.schedule, doors, control
        self._synchronous, self._trains = not scheme.asynchronous, scheme.trains
        self._versions = WeightVersions(scheme.policy, *seat[:2], Newest, lambda ahead: stage.weights(Newest(ahead)))
        self._in_flight: dict[int, tuple[Microbatch, SavedForBackward | None]] = {}
        self._gradients: list[Any] | None = None
        self._now: tuple[Microbatch, tuple[Action, ...]] | None = None

    def ended(self) -> None:
        """Wait until the thread has ended, if it was ever started: an interrupt may have come while it was."""
        until_s = time.monotonic() + STARTS_S
        while self.ident is None and self in threading.enumerate() and time.monotonic() < until_s:
            time.sleep(1e-3)
        if self.ident is not None:
            self.join()

    @property
    def updates(self) -> int:
        """Updates made since the start."""
        return self._versions.version

    def transfers(self) -> Iterator[Transfer]:
        """What this worker sent, and the sums that it shared in."""
        stage, _, replica, _ = self._seat
        if self._doors.below:
            yield from self._doors.below.transfers("F", stage, stage + 1)
        if self._doors.above:
            yield from self._doors.above.transfers("B", stage, stage - 1)
        yield from self._doors.reduction.transfers(stage, replica)

    def run(self) -> None:
        """The thread's body. An exception stops the pipeline and is kept for its caller."""
        try:
            pin(self._stage.device)
            with tf.device(self._stage.device):
                actions = self._schedule(*self._seat[:2], self._arrivals())
                for action in actions:
                    following = next(actions) if self._turns and action.op == "F" else None
                    if following is not None and following.op == "B" and following.minibatch == action.minibatch:
                        self._turn(action, following)
                    else:
                        for each in filter(None, (action, following)):
                            self._act(each)
        except Closed:
            pass
        except BaseException as error:
            self._control.fail(error, self._place())

    def _arrivals(self) -> Iterator[range]:
        """The schedule's groups, as their first microbatches arrive."""
        while (microbatch := self._doors.inbox.peek()) is not None:
            yield microbatch.group
        if self._doors.below:
            self._doors.below.close()

    @property
    def _turns(self) -> bool:
        """Whether a microbatch's backward may follow its forward in the same call.

        At the last stage, whose forwards are followed by something that needs no arrival, and where nobody waits to
        have the times of either.
        """
        return self._trains and self._doors.below is None and not self._control.waits

    def _act(self, action: Action) -> None:
        forward = action.op == "F"
        received = self._doors.inbox.get() if forward else self._returned()
        self._control.rest()
        start_s, version = time.perf_counter(), self._versions.version
        self._now = received if forward else self._in_flight[action.minibatch][0], (action,)
        if forward:
            self._forward(received)
        else:
            self._backward(action.minibatch, received)
        self._finish()
        self._record(version, start_s, (action, time.perf_counter()))

    def _turn(self, forward: Action, backward: Action) -> None:
        """Both actions, as one call of the stage where there is something to compute, with the same weights."""
        received = self._doors.inbox.get()
        self._control.rest()
        start_s, version = time.perf_counter(), self._versions.version
        self._now = received, (forward,)
        if received.values is None or not self._versions.lasts(received.minibatch):
            self._forward(received)
            middle_s, self._now = time.perf_counter(), (received, (backward,))
            self._backward(backward.minibatch, None)
        else:
            middle_s = self._forward_backward(received, forward, backward)
        end_s = time.perf_counter()
        middle_s = end_s if middle_s is None else min(max(start_s, middle_s), end_s)  # the time of day may be set anew
        self._record(version, start_s, (forward, middle_s), (backward, end_s))

    def _record(self, version: int, start_s: float, *done: tuple[Action, float]) -> None:
        """Actions one after another, each with its end."""
        stage, _, replica, _ = self._seat
        for action, end_s in done:
            self.busy_s += end_s - start_s
            self.spans.append(
                Span(action.op, stage, action.minibatch, self._stage.device, start_s, end_s, version, replica)
            )
            start_s = end_s

    def _returned(self) -> list[tf.Tensor] | None:
        return self._doors.returns.get() if self._doors.below else None

    def _forward(self, microbatch: Microbatch) -> None:
        below = self._doors.below
        weights = self._versions.forward(microbatch.minibatch)
        if self._stage.recompute and not self._versions.lasts(microbatch.minibatch):
            weights = self._stage.weights(weights)
        result, output, loss = None, None, None
        if microbatch.values is not None:
            result = self._stage.forward(weights, *self._inputs(microbatch))
            output, loss = result.output, result.loss
        microbatch = self._passed(microbatch, result)
        if self._trains:
            self._in_flight[microbatch.index] = (microbatch, result and result.kept)
            self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        if below:
            sent = self._with_part_of_penalty(microbatch)
            self._finish()
            below.send(sent.with_values, output, microbatch.rows, microbatch.index)
        else:
            self._control.report(Output(self._shared(microbatch), self._seat.replica, loss, output))

    def _backward(self, index: int, returned: list[tf.Tensor] | None) -> None:
        microbatch, kept = self._in_flight.pop(index)
        weights = self._versions.backward(microbatch.minibatch)
        pulled = None if kept is None else self._pull(microbatch, weights, kept, returned)
        del weights, kept  # held by nobody, the variables' buffers are updated in place
        self._pass_on(microbatch, pulled)

    def _forward_backward(self, microbatch: Microbatch, forward: Action, backward: Action) -> float | None:
        """The two as one call, which reads the weights once; gives when the forward was done, if that is known."""
        weights = self._versions.forward(microbatch.minibatch)
        self._versions.backward(microbatch.minibatch)  # the same
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight) + 1)
        inputs = self._inputs(microbatch)
        self._now = microbatch, (forward, backward)
        pulled = self._pull(microbatch, weights, inputs, None)
        del weights, inputs
        self._now = microbatch, (backward,)
        result = pulled.forward
        done = self._shared(self._passed(microbatch, result))
        self._control.report(Output(done, self._seat.replica, result.loss, result.output))
        self._pass_on(microbatch, pulled)
        return pulled.forward_end_s

    def _passed(self, microbatch: Microbatch, result: Forward | None) -> Microbatch:
        """The microbatch after this stage's forward, with its layers' own losses."""
        if result is None or result.penalty is None:
            return microbatch.passed(None)
        return microbatch.passed(as_mean(result.penalty, self._shared(microbatch).share))

    def _inputs(self, microbatch: Microbatch) -> Inputs:
        last = self._doors.below is None
        targets = take(microbatch.targets, self._mine(microbatch), microbatch.rows) if last else None
        return Inputs(microbatch.values, targets)

    def _pull(
        self, microbatch: Microbatch, weights: Any, given: SavedForBackward | Inputs, returned: list[tf.Tensor] | None
    ) -> BackwardResult:
        """The stage's backward, with what goes into the same call; what gradients it leaves are kept for the next."""
        mine = self._shared(microbatch)
        starts = [mine.loss_share] if returned is None else returned
        step = self._begin_update(microbatch) if self._updates_by(microbatch) else None
        total, self._gradients = self._gradients, None
        pulled = self._stage.backward(weights, given, starts, mine.share, total, step)
        self._gradients = pulled.gradients
        return pulled

    def _pass_on(self, microbatch: Microbatch, pulled: BackwardResult | None) -> None:
        """The inputs' gradients go up, and with its last microbatch's a minibatch's are used."""
        self._finish()
        if self._doors.above:
            by_input = None if pulled is None else pulled.by_input
            self._doors.above.send(lambda values: values, by_input, microbatch.rows, microbatch.index)
        if pulled is not None and pulled.gradients is None:
            self._updated()
        elif microbatch.index == microbatch.group[-1]:
            self._update(microbatch)

    def _updates_by(self, microbatch: Microbatch) -> bool:
        """Whether the minibatch's gradients are complete with this one's, and no other stage or replica needs them."""
        alone = self._seat.replicas == 1 and self._doors.norm is None
        return alone and microbatch.index == microbatch.group[-1] and bool(self._stage.variables)

    def _begin_update(self, microbatch: Microbatch) -> Step:
        """Keeps the weights that are still read."""
        step = Step(microbatch.learning_rate, self._versions.staleness(microbatch.minibatch))
        self._versions.before_update()
        return step

    def _update(self, microbatch: Microbatch) -> None:
        step = self._begin_update(microbatch)
        stage, _, replica, _ = self._seat
        gradients, self._gradients = self._doors.reduction.sum(replica, self._gradients, microbatch.index), None
        squares = self._doors.norm.squares(stage, replica, gradients) if self._doors.norm else None
        self._stage.update(gradients, step, squares)
        self._updated()

    def _updated(self) -> None:
        stage, _, replica, _ = self._seat
        version = self._versions.version
        wanted = replica == 0 and self._control.wants_snapshot(version)
        snapshot = self._stage.snapshot() if wanted else None
        if self._synchronous or wanted:  # else nobody waits for it, and waking the caller costs
            self._control.report(Updated(stage, replica, version, snapshot))

    def _finish(self) -> None:
        """Before the clock is read, and before anything is handed over, which so is there."""
        if self._control.waits:
            finish(self._stage.device)

    def _mine(self, microbatch: Microbatch) -> range:
        return rows_of(microbatch.rows, self._seat.replica, self._seat.replicas)

    def _shared(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with the share of the minibatch that this replica's rows are."""
        if self._seat.replicas == 1:
            return microbatch
        return microbatch._replace(share=microbatch.share * self._fraction(microbatch))

    def _fraction(self, microbatch: Microbatch) -> float:
        """The part of the microbatch's rows that are this replica's."""
        return len(self._mine(microbatch)) / microbatch.rows if microbatch.rows else 1 / self._seat.replicas

    def _with_part_of_penalty(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with what this replica contributes to the penalty of all replicas' rows."""
        if microbatch.penalty is None or self._seat.replicas == 1:
            return microbatch
        return microbatch._replace(penalty=microbatch.penalty * self._fraction(microbatch))

    def _place(self) -> str:
        """For people: what this stage was doing."""
        if self._now is None:
            return f"Raised in {self.name.removeprefix('pipetrain ')} before its first action."
        microbatch, actions = self._now
        if len(actions) > 1 and (had_run := self._stage.had_run()) is not None:
            actions = (actions[had_run],)
        kind = " or ".join("forward" if action.op == "F" else "backward" for action in actions)
        which = f"minibatch {microbatch.minibatch}"
        if len(microbatch.group) > 1:
            which += f", microbatch {microbatch.index - microbatch.group[0]}"
        names = " or ".join(map(str, actions))
        return f"Raised in {self.name.removeprefix('pipetrain ')}, {kind} of {which} (action {names})."
