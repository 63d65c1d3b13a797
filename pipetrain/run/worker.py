"""The thread of one stage: walks the stage's order of actions, waiting for each action's inputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.bound import Newest
from pipetrain.compute.stage import Kept, Stage, Values
from pipetrain.plan.actions import Action
from pipetrain.plan.schemes import Scheme
from pipetrain.plan.trace import Span
from pipetrain.plan.versions import WeightVersions
from pipetrain.run.devices import pin, transfer
from pipetrain.run.mailbox import Closed, Mailbox
from pipetrain.run.messages import Microbatch, Output, Updated


class Door(NamedTuple):
    """A neighbour's mailbox and the device its reader works on."""

    mailbox: Mailbox[Any]
    device: str


class Doors(NamedTuple):
    """A stage's mailboxes: microbatches come into ``inbox``, gradients into ``returns``; None past the ends.

    A None in the inbox says that no more microbatches will come.
    """

    inbox: Mailbox[Microbatch | None]
    returns: Mailbox[list[tf.Tensor]]
    above: Door | None
    below: Door | None


class Control:
    """What the workers share: where they report, and the switch that pauses them."""

    def __init__(
        self,
        report: Callable[[Output | Updated], None],
        fail: Callable[[BaseException, str], None],
        wants_snapshot: Callable[[int], bool],
    ) -> None:
        self.report, self.fail, self.wants_snapshot = report, fail, wants_snapshot
        self.running = threading.Event()
        self.running.set()


class Worker(threading.Thread):
    """One stage of a pipeline, from one start to one drain."""

    def __init__(self, number: int, stages: int, stage: Stage, scheme: Scheme, doors: Doors, control: Control) -> None:
        super().__init__(name=f"pipetrain stage {number}", daemon=True)
        self.spans: list[Span] = []
        self._number, self._stages, self._stage = number, stages, stage
        self._schedule, self._doors, self._control = scheme.schedule, doors, control
        self._synchronous = not scheme.asynchronous
        self._versions = WeightVersions(scheme.policy, number, stages, newest=Newest, keep=stage.weights)
        self._in_flight: dict[int, tuple[Microbatch, Kept]] = {}
        self._gradients: list[Any] | None = None
        self._now: tuple[Action, Microbatch] | None = None

    @property
    def updates(self) -> int:
        """Updates made since the start."""
        return self._versions.version

    def run(self) -> None:
        """The thread's body. An exception stops the pipeline and is kept for its caller."""
        try:
            pin(self._stage.device)
            for action in self._schedule(self._number, self._stages, self._arrivals()):
                self._act(action)
        except Closed:
            pass
        except BaseException as error:
            self._control.fail(error, self._place())

    def _arrivals(self) -> Iterator[range]:
        """The schedule's groups, as their first microbatches arrive."""
        while (microbatch := self._doors.inbox.peek()) is not None:
            yield microbatch.group
        if self._doors.below:
            self._doors.below.mailbox.put(None)

    def _act(self, action: Action) -> None:
        forward = action.op == "F"
        received = self._doors.inbox.get() if forward else self._returned()
        self._control.running.wait()
        start_s, version = time.perf_counter(), self._versions.version
        self._now = action, received if forward else self._in_flight[action.minibatch][0]
        if forward:
            self._forward(received)
        else:
            self._backward(action.minibatch, received)
        span = Span(
            action.op, self._number, action.minibatch, self._stage.device, start_s, time.perf_counter(), version
        )
        self.spans.append(span)

    def _returned(self) -> list[tf.Tensor] | None:
        return self._doors.returns.get() if self._doors.below else None

    def _forward(self, microbatch: Microbatch) -> None:
        below = self._doors.below
        weights = self._versions.forward(microbatch.minibatch)
        if self._stage.recompute and not self._versions.lasts(microbatch.minibatch):
            weights = self._stage.weights(weights)
        result = self._stage.forward(weights, microbatch.values, None if below else microbatch.targets)
        microbatch = microbatch.passed(result.penalty)
        self._in_flight[microbatch.index] = (microbatch, result.kept)
        if below:
            masks = [None if mask is None else transfer(mask, below.device) for mask in result.output.masks]
            values = Values([transfer(tensor, below.device) for tensor in result.output.tensors], masks)
            below.mailbox.put(microbatch._replace(values=values))
        else:
            self._control.report(Output(microbatch, result.loss, result.output))

    def _backward(self, index: int, returned: list[tf.Tensor] | None) -> None:
        microbatch, kept = self._in_flight.pop(index)
        above = self._doors.above
        weights = self._versions.backward(microbatch.minibatch)
        starts = [microbatch.loss_share] if returned is None else returned
        gradients, by_input = self._stage.backward(weights, kept, starts, microbatch.share)
        del weights, kept  # held by nobody, the variables' buffers are updated in place
        if above:
            above.mailbox.put([transfer(gradient, above.device) for gradient in by_input])
        self._gradients = self._stage.accumulate(self._gradients, gradients)
        if index == microbatch.group[-1]:
            self._update(microbatch.learning_rate)

    def _update(self, learning_rate: float | None) -> None:
        self._versions.before_update()
        gradients, self._gradients = self._gradients or [], None
        self._stage.update(gradients, learning_rate)
        version = self._versions.version
        snapshot = self._stage.snapshot() if self._control.wants_snapshot(version) else None
        if self._synchronous or snapshot is not None:  # else nobody waits for it, and waking the caller costs
            self._control.report(Updated(self._number, version, snapshot))

    def _place(self) -> str:
        """For people: what this stage was doing."""
        if self._now is None:
            return f"Raised in stage {self._number} before its first action."
        action, microbatch = self._now
        kind = "forward" if action.op == "F" else "backward"
        which = f"minibatch {microbatch.minibatch}"
        if len(microbatch.group) > 1:
            which += f", microbatch {action.minibatch - microbatch.group[0]}"
        return f"Raised in stage {self._number}, {kind} of {which} (action {action})."
