"""Sums over stages of the gradients of weights that these share, so that every copy makes the same update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.backward import over_stages
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import Step
from pipetrain.run.mailbox import Mailbox
from pipetrain.run.transfers import moved, size_bytes
from pipetrain.trace.recent import Recent
from pipetrain.trace.records import Transfer, Transfers

Gradients = list[Any]


class SharedUpdate(NamedTuple):
    """The gradients of a minibatch summed over all stages, and the other inputs of the update that they make.

    There are no gradients where the step is skipped.
    """

    gradients: Gradients
    step: Step


class SharedGradients:
    """What the stages that have the same weights send each other.

    Every stage adds its gradients of a minibatch to the sum of the later ones, and sends the sum to the one before. The
    first completes it, makes its update, and sends what it has completed to all others, which make the same update when
    the rule of versions says so. Each sum is sent to every replica by the first replica: replicas have equal gradients.

    There is no deadlock: a stage has sent its sum before an earlier one completes the minibatch, and a stage that waits
    for a completed sum waits for an earlier minibatch than its own, or a forward of the first stage that came first.

    Args:
        holders: the stages that have the weights, in order.
        stages: the replicas of every stage of the pipeline.
        kept: how many transfers of a stage are recorded, the newest.
    """

    def __init__(self, holders: Sequence[int], stages: Sequence[Sequence[Stage]], kept: int) -> None:
        self.holders = tuple(holders)
        self._stages = {stage: list(stages[stage]) for stage in holders}
        self._up: dict[int, list[Mailbox[Gradients]]] = {k: [Mailbox() for _ in stages[k]] for k in holders[:-1]}
        self._down: dict[int, list[Mailbox[SharedUpdate]]] = {k: [Mailbox() for _ in stages[k]] for k in holders[1:]}
        self._sent = {k: Recent(Transfers, kept) for k in holders}

    @property
    def mailboxes(self) -> list[Mailbox[Any]]:
        """All mailboxes at which stages may wait."""
        return [box for way in (self._up, self._down) for boxes in way.values() for box in boxes]

    @property
    def first(self) -> int:
        """The stage that completes the sums."""
        return self.holders[0]

    def sum(self, stage: int, replica: int, gradients: Gradients, microbatch: int) -> Gradients | None:
        """Add a stage's gradients to those of the later ones: the sum over all stages for the first, None for others.

        ``microbatch`` is the number under which it is recorded.
        """
        if stage in self._up:
            later = moved(self._up[stage][replica].get(), self._stages[stage][replica].device)
            gradients = [over_stages(a, b) for a, b in zip(later, gradients, strict=True)]
        if stage == self.first:
            return gradients
        above = self.holders[self.holders.index(stage) - 1]
        if replica == 0:
            self._send(self._up[above], gradients, gradients, (stage, above, microbatch))
        return None

    def hand_down(self, replica: int, completed: SharedUpdate, microbatch: int) -> None:
        """Send what the first stage has completed to all others."""
        for stage in self.holders[1:] if replica == 0 else ():
            self._send(self._down[stage], completed, completed.gradients, (self.first, stage, microbatch))

    def completed(self, stage: int, replica: int) -> SharedUpdate:
        """The next minibatch's sum, for a stage that is not the first; waits for it."""
        completed = self._down[stage][replica].get()
        return completed._replace(gradients=moved(completed.gradients, self._stages[stage][replica].device))

    def transfers(self, stage: int, replica: int) -> Transfers:
        """The transfers that this replica of the stage has made."""
        return self._sent[stage].columns() if replica == 0 else Transfers.of(())

    def _send(
        self, boxes: Sequence[Mailbox[Any]], message: Any, gradients: Gradients, way: tuple[int, int, int]
    ) -> None:
        stage, other, microbatch = way
        size = size_bytes(tf.nest.flatten(gradients, expand_composites=True))
        for replica, box in enumerate(boxes):
            start_s = time.perf_counter()
            box.put(message)
            sent = Transfer("S", microbatch, stage, 0, other, replica, size, start_s, time.perf_counter())
            self._sent[stage].append(sent)
