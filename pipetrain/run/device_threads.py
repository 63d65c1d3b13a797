"""The threads of a pipeline at work, one for each device, from its start to its drain."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import tensorflow as tf

from pipetrain.compute.cores import pin
from pipetrain.compute.functions.inference import Replica
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.transfers.compression import messages_of_cuts
from pipetrain.run.channels import Channels, CutFunctions, Destination, Receiver, Sender
from pipetrain.run.channels import joined as joined_rows
from pipetrain.run.collector import Collector, Microbatch
from pipetrain.run.control import Control, RunSettings, StoppableThread
from pipetrain.run.gradient_exchange import Closed, GradientExchange, Mailbox, Reduction, SharedGradients
from pipetrain.run.stage_weights import StageId
from pipetrain.run.stage_work import StageWork
from pipetrain.schemes.actions import Action, Op
from pipetrain.schemes.schedules import fused, fusible, joined
from pipetrain.schemes.scheme import Scheme
from pipetrain.trace.records import Recent, Span, Spans

SHORT_S = 5e-4  # a stage whose inputs are there must not wait Python's usual 5 ms for its turn

_HOLDING = threading.Lock()
_holders: set[int] = set()
_usual_s = 0.0


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


class Running:
    """The threads of a pipeline, one for each replica of what a device has, from one start to one drain.

    Args:
        stages: the replicas of every stage in order.
        scheme: order of actions and choice of weights.
        microbatches: of a minibatch.
        settings: of this run.
        kept: how many spans, and transfers, are recorded, the newest.

    ``entrance`` takes microbatches, ``collector`` makes results of what is reported, ``posted`` counts minibatches.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Replica]],
        scheme: Scheme,
        microbatches: int,
        settings: RunSettings,
        kept: int = 0,
    ) -> None:
        self.settings, self.posted, self.control = settings, 0, Control(settings)
        self.collector = Collector([len(stage) for stage in stages], not scheme.asynchronous, settings.steps)
        self._stages, self._scheme, self._microbatches = stages, scheme, microbatches
        # Of the newest of all threads, each has about as many: some more, since which they are is not known.
        self._kept = 2 * kept // sum(len(stage) for stage in stages)
        works = self._works()
        self.works = [work for replicas in works for work in replicas]
        self.threads = self._threads(works)

    def start(self) -> None:
        """Start the threads."""
        for thread in self.threads:
            thread.start()

    def _threads(self, works: Sequence[Sequence[StageWork]]) -> list[DeviceThread]:
        schedule, threads = self._scheme.schedule, []
        devices = schedule.devices(len(works))
        for device in range(devices):
            stages = [works[stage] for stage in schedule.stages_on(device, len(works))]
            for replicas in zip(*stages, strict=True):
                work, kept = (self._scheme, self._microbatches, self.control), self._kept * len(replicas)
                threads.append(DeviceThread(device, devices, replicas, *work, kept))
        return threads

    def _works(self) -> list[list[StageWork]]:
        every = self.control.boxes
        # Microbatches come from the replicas above (into stage 0 from the caller), gradients from those below.
        sizes = [len(stage) for stage in self._stages]
        down = [_mailboxes(*pair) for pair in zip(sizes, [1, *sizes[:-1]], strict=True)]
        up = [_mailboxes(*pair) for pair in zip(sizes, [*sizes[1:], 0], strict=True)]
        done, count = self.settings.minibatches, self._microbatches
        reductions = [Reduction(stage, self._kept, lambda m: done + m // count) for stage in self._stages]
        every += [box for way in (down, up) for stage in way for boxes in stage for box in boxes]
        every += [box for reduction in reductions for box in reduction.mailboxes]
        summaries, scale = None, self.settings.loss_scale
        if scale.is_dynamic or self._stages[0][0].global_clipnorm:
            summaries = GradientExchange(cast("list[list[Stage]]", self._stages), scale.is_dynamic)
            every += summaries.mailboxes
        sharing = dict.fromkeys(group.holders for stage in self._stages for group in stage[0].shared)
        replicas_of = cast("list[list[Stage]]", self._stages)
        shared = {holders: SharedGradients(holders, replicas_of, self._kept) for holders in sharing}
        every += [box for each in shared.values() for box in each.mailboxes]
        # Weights that are shared may be so by stages of one device, whose sums are then added in the order of stages.
        several = bool(sharing) and self._scheme.schedule.chunks > 1 and not self._scheme.asynchronous
        self.entrance = _sender(down[0], self._stages[0], 0, 1)
        cuts = messages_of_cuts(self._scheme.compression, [replica for replica, *_ in self._stages]) or []

        def crossing(cut: int) -> CutFunctions | None:
            """One for each replica and way: threads trace their own functions."""
            return CutFunctions(cuts[cut], count, done) if 0 <= cut < len(cuts) else None

        works: list[list[StageWork]] = [[] for _ in self._stages]
        last = len(self._stages) - 1
        for k, stage in enumerate(self._stages):
            for number, replica in enumerate(stage):
                identity = StageId(k, len(self._stages), number, len(stage))
                mine = number, len(stage), self._kept
                joins = cast("Callable[[list[Any]], list[Any] | None]", joined_rows)
                before, after = crossing(k - 1), crossing(k)
                channels = Channels(
                    inbox=Receiver(down[k][number], _joined_microbatches, partial(_opened, before)),
                    returns=Receiver(up[k][number], joins, None if after is None else after.decoded),
                    above=_sender(up[k - 1], self._stages[k - 1], *mine, crossing(k - 1)) if k > 0 else None,
                    below=_sender(down[k + 1], self._stages[k + 1], *mine, crossing(k)) if k < last else None,
                    reduction=reductions[k],
                    summaries=summaries,
                    shared=[shared[group.holders] for group in replica.shared],
                    together=summaries is not None or several,
                )
                settings = self._scheme, self._microbatches, channels, self.control, scale
                works[k].append(StageWork(identity, replica, *settings))
        return works


def _mailboxes(readers: int, writers: int) -> list[list[Mailbox[Any]]]:
    """A mailbox for every reader and every writer."""
    return [[Mailbox() for _ in range(writers)] for _ in range(readers)]


def _sender(
    boxes: list[list[Mailbox[Any]]],
    readers: Sequence[Replica],
    replica: int,
    replicas: int,
    kept: int = 0,
    crossing: CutFunctions | None = None,
) -> Sender:
    """The sender of one replica: to each reader, the mailbox for this writer."""
    destinations = [Destination(mine[replica], reader.device) for mine, reader in zip(boxes, readers, strict=True)]
    return Sender(destinations, replica, replicas, kept, crossing)


def _opened(crossing: CutFunctions | None, microbatch: Microbatch | None) -> Microbatch | None:
    """A microbatch whose values have come as messages, if they have; None at the end."""
    if crossing is None or microbatch is None:
        return microbatch
    return microbatch.with_values(crossing.decoded(microbatch.values))


def _joined_microbatches(parts: Sequence[Microbatch | None]) -> Microbatch:
    """One microbatch joined from the parts of the replicas above: rows concatenated, penalties added."""
    present = [part for part in parts if part is not None]
    penalties = [part.penalty for part in present if part.penalty is not None]
    values = joined_rows([part.values for part in present])
    return present[0].with_values(values)._replace(penalty=tf.add_n(penalties) if penalties else None)


def shorten(holder: object) -> None:
    """Shorten the interval until ``holder`` and all other holders have called ``let_go``."""
    global _usual_s
    with _HOLDING:
        if not _holders:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(SHORT_S)
        _holders.add(id(holder))


def let_go(holder: object) -> None:
    """Restore the interval if no other holder is left; does nothing for an object that is not a holder."""
    with _HOLDING:
        if id(holder) in _holders:
            _holders.discard(id(holder))
            if not _holders:
                sys.setswitchinterval(_usual_s)
