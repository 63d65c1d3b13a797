"""The thread of one device: executes its actions in the schedule's order, waiting for each action's inputs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from pipetrain.compute.cores import pin
from pipetrain.run.control import Control
from pipetrain.run.mailbox import Closed
from pipetrain.run.stage_work import StageWork
from pipetrain.run.stoppable_thread import StoppableThread
from pipetrain.schemes.actions import Action, Op
from pipetrain.schemes.schedules import fused, fusible, joined
from pipetrain.schemes.scheme import Scheme
from pipetrain.trace.recent import Recent
from pipetrain.trace.records import Span, Spans


class DeviceThread(StoppableThread):
    """Executes the schedule of one device, from one start of the pipeline to one drain.

    Args:
        device: its number in the schedule.
        devices: how many the schedule has.
        stages: one replica of each of the device's stages, in their order.
        scheme: whose schedule it executes.
        microbatches: of a minibatch.
        control: what all threads share.
        kept: how many spans are recorded, the newest.
    """

    def __init__(
        self,
        device: int,
        devices: int,
        stages: Sequence[StageWork],
        scheme: Scheme,
        microbatches: int,
        control: Control,
        kept: int,
    ) -> None:
        super().__init__(name=f"pipetrain {' and '.join(str(stage.identity) for stage in stages)}", daemon=True)
        self.stages = list(stages)
        self.spans = Recent(Spans, kept)
        self.busy_s = 0.0
        self._place, self._scheme, self._control = (device, devices), scheme, control
        self._microbatches = microbatches
        self._by_number = {stage.identity.stage: stage for stage in stages}
        self._at: StageWork = stages[0]

    def run(self) -> None:
        """The thread's body. An exception stops the pipeline and is kept for its caller."""
        try:
            pin(self._at.device)
            with tf.device(self._at.device):
                for actions in joined(self._actions(), self._microbatches):
                    self._act(actions)
                for stage in self.stages:
                    stage.catch_up()
        except Closed:
            pass
        except BaseException as error:
            self._control.fail(error, f"Raised in {self._at.doing()}")

    def _actions(self) -> Iterator[Action]:
        """The device's actions; the last stage's F and B, or I, are one call unless exact times of each are wanted."""
        order, last = self._scheme.schedule.order, self.stages[-1].identity.stages - 1
        actions = order(*self._place, self._arrivals())
        together = last in self._by_number and fusible(order, *self._place, last, self._microbatches)
        return fused(actions, last) if together and not self._control.waits else actions

    def _arrivals(self) -> Iterator[range]:
        """The schedule's groups of microbatches, as the first of each arrives at the device's first stage."""
        last = -1
        while (microbatch := self.stages[0].arriving()) is not None:
            last = microbatch.group[-1]
            yield microbatch.group
        for stage in self.stages:
            stage.ends_after(last)

    def _act(self, actions: Sequence[Action]) -> None:
        """Execute an action, or some W of one stage in one call: each then has an equal part of its time."""
        action, middle_s = actions[0], None
        stage = self._at = self._by_number[action.stage]
        received = stage.receive(action)
        self._control.wait_if_paused()
        start_s, version = time.perf_counter(), stage.version
        if action.op == "W":
            stage.weight_gradients(actions)
        else:
            middle_s = stage.perform(action, received)
        if all(each.updates.are_awaited for each in self.stages):
            self._update()
        end_s = time.perf_counter()
        self.busy_s += end_s - start_s
        if action.op in ("FB", "FI"):
            middle_s = end_s if middle_s is None else min(max(start_s, middle_s), end_s)  # the clock may be set anew
            self._record("F", action, version, start_s, middle_s)
            self._record("B" if action.op == "FB" else "I", action, version, middle_s, end_s)
        else:
            ends_s = [start_s + (end_s - start_s) * n / len(actions) for n in range(len(actions) + 1)]
            for each, from_s, to_s in zip(actions, ends_s, ends_s[1:], strict=False):
                self._record(each.op, each, version, from_s, to_s)

    def _update(self) -> None:
        """Update all stages of the device, which all have their gradients.

        They are completed from the last stage to the first one, as those of shared weights are added. When each has
        told the others of its own, all wait for what these tell.
        """
        for stage in reversed(self.stages):
            self._at = stage
            stage.updates.complete()
        for stage in self.stages:
            self._at = stage
            stage.updates.finish()

    def _record(self, op: Op, action: Action, version: int, start_s: float, end_s: float) -> None:
        _, stage, microbatch = action
        device, replica = self._at.device, self._at.identity.replica
        self.spans.append(Span(op, stage, microbatch, device, start_s, end_s, version, replica))
