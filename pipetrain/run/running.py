"""A pipeline at work, from its start to its drain: its threads, and what they send each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from pipetrain.compute.functions.inference import Replica
from pipetrain.compute.functions.stage import Stage
from pipetrain.run.channels import Channels, Destination, Receiver, Sender, joined
from pipetrain.run.collector import Collector
from pipetrain.run.control import Control
from pipetrain.run.device_thread import DeviceThread
from pipetrain.run.gradient_exchange import GradientExchange
from pipetrain.run.mailbox import Mailbox
from pipetrain.run.messages import Microbatch
from pipetrain.run.reduction import Reduction
from pipetrain.run.run_settings import RunSettings
from pipetrain.run.shared_gradients import SharedGradients
from pipetrain.run.stage_id import StageId
from pipetrain.run.stage_work import StageWork
from pipetrain.schemes.scheme import Scheme


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
        reductions = [Reduction(stage, self._kept) for stage in self._stages]
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
        works: list[list[StageWork]] = [[] for _ in self._stages]
        last = len(self._stages) - 1
        for k, stage in enumerate(self._stages):
            for number, replica in enumerate(stage):
                identity = StageId(k, len(self._stages), number, len(stage))
                mine = number, len(stage), self._kept
                channels = Channels(
                    inbox=Receiver(down[k][number], _joined_microbatches),
                    returns=Receiver(up[k][number], cast("Callable[[list[Any]], list[Any] | None]", joined)),
                    above=_sender(up[k - 1], self._stages[k - 1], *mine) if k > 0 else None,
                    below=_sender(down[k + 1], self._stages[k + 1], *mine) if k < last else None,
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
    boxes: list[list[Mailbox[Any]]], readers: Sequence[Replica], replica: int, replicas: int, kept: int = 0
) -> Sender:
    """The sender of one replica: to each reader, the mailbox for this writer."""
    destinations = [Destination(mine[replica], reader.device) for mine, reader in zip(boxes, readers, strict=True)]
    return Sender(destinations, replica, replicas, kept)


def _joined_microbatches(parts: Sequence[Microbatch | None]) -> Microbatch:
    """One microbatch joined from the parts of the replicas above: rows concatenated, penalties added."""
    present = [part for part in parts if part is not None]
    penalties = [part.penalty for part in present if part.penalty is not None]
    values = joined([part.values for part in present])
    return present[0].with_values(values)._replace(penalty=tf.add_n(penalties) if penalties else None)
