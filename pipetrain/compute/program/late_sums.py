"""A minibatch's gradients where stages are at different minibatches: each updates as soon as it has its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.backward import over_stages
from pipetrain.compute.functions.stage_values import Step
from pipetrain.compute.program.clock import Clock
from pipetrain.compute.program.stage_trace import StageTrace
from pipetrain.compute.program.sums import Gradients, Sums, moved

Holders = tuple[int, ...]


class SharedSum(NamedTuple):
    """Complete gradients of shared weights, on the device of the first stage that has them, and their staleness."""

    gradients: Gradients
    staleness: int


class HeldSums(NamedTuple):
    """What is held of shared weights' gradients between two functions of a course.

    ``totals`` are, by the stages that have the weights, a stage and a minibatch, the sums over this stage and the later
    ones; ``completed`` those over all stages, which some stage has not used yet.
    """

    totals: dict[tuple[Holders, int, int], Gradients]
    completed: dict[tuple[Holders, int], SharedSum]


class LateSums(Sums):
    """What the updates of stages need of each other that do not wait for each other.

    Gradients of weights that several stages have are added from the last of these to the first, each stage when it has
    its own. The first one completes them and updates its copy. The others update theirs when an action of their own
    finds that version.

    Args:
        traces: the replicas of every stage.
        microbatches: of a minibatch.
        clock: notes when sums are there, if that is wanted.
    """

    def __init__(self, traces: Sequence[Sequence[StageTrace]], microbatches: int, clock: Clock | None) -> None:
        super().__init__(traces, False, clock)
        self._microbatches = microbatches
        self._totals: dict[tuple[Holders, int, int], Gradients] = {}
        self._handed: dict[tuple[Holders, int], SharedSum] = {}
        self._updated = Counter[int]()  # replicas of a stage, by the minibatch under way

    def held(self, since: int) -> HeldSums:
        """What the next function goes on with, minibatches counted from this one on."""
        totals = {(holders, stage, i - since): each for (holders, stage, i), each in self._totals.items()}
        completed = {
            (holders, i - since): each
            for (holders, i), each in self._handed.items()
            if any(self._version(trace, holders) <= i for stage in holders for trace in self._traces[stage])
        }
        return HeldSums(totals, completed)

    def _version(self, trace: StageTrace, holders: Holders) -> int:
        (number,) = [n for n, group in enumerate(trace.stage.shared) if group.holders == holders]
        return trace.shared[number].version - trace.base

    def resume(self, held: HeldSums) -> None:
        """Go on with what an earlier function has left."""
        self._totals, self._handed = dict(held.totals), dict(held.completed)

    def needed(self, stage: int) -> list[int]:
        """Those of no other stage."""
        return [stage]

    def is_ready(self, stage: int, microbatch: int) -> bool:
        """Whether later stages have added theirs to the gradients of shared weights."""
        minibatch = microbatch // self._microbatches
        return all(
            later not in holders or (holders, later, minibatch) in self._totals
            for holders in self._holders[stage]
            for later in [self._later(holders, stage)]
        )

    def _later(self, holders: Holders, stage: int) -> int | None:
        """The next stage that has the weights."""
        return next((each for each in holders if each > stage), None)

    def update(self, trace: StageTrace, microbatch: int, ended: int | None = None) -> list[tf.Operation]:
        """Update the weights of a replica that are its own, and those shared ones that it completes."""
        stage, _, replica, replicas = trace.place
        gradients = list(self._reduced(stage)[replica])
        if self._clock is not None and ended is not None:
            self._note(trace, gradients, microbatch, ended)
        trace.gathered = None
        step = trace.step(microbatch)
        for number, group in enumerate(trace.stage.shared):
            mine = self._total(trace, group.holders, [gradients[n] for n in group.numbers], microbatch)
            for n, each in zip(group.numbers, mine, strict=True):
                gradients[n] = each if stage == group.holders[0] else None
            if stage == group.holders[0]:
                self._complete_by(trace, number, mine, microbatch)
        if not trace.has_updated:
            # Only a pipeline of one stage clips by the norm of all gradients.
            squares = tf.stack([trace.stage.squared_norm(gradients, step)]) if self._has_norm else None
            with tf.control_dependencies(trace.begin_update(microbatch)):
                trace.stage.update(gradients, step, squares)
        trace.has_updated = False
        self._updated[stage] += 1
        if self._updated[stage] == replicas:
            self._forget(stage, microbatch // self._microbatches)
        return []

    def _forget(self, stage: int, minibatch: int) -> None:
        """All replicas of a stage have used their gradients of a minibatch."""
        del self._of_replicas[stage], self._updated[stage]
        for holders in self._holders[stage]:
            self._totals.pop((holders, self._later(holders, stage) or -1, minibatch), None)

    def _total(self, trace: StageTrace, holders: Holders, mine: Gradients, microbatch: int) -> Gradients:
        """The gradients of shared weights summed over this stage and the later ones, on this replica's device."""
        stage, _, replica, _ = trace.place
        minibatch, later = microbatch // self._microbatches, self._later(holders, stage)
        if later is not None:
            below = [moved(each, trace.device) for each in self._totals[holders, later, minibatch]]
            mine = [over_stages(a, b) for a, b in zip(below, mine, strict=True)]
        if replica == 0 and stage != holders[0]:
            self._totals[holders, stage, minibatch] = mine
        return mine

    def _complete_by(self, trace: StageTrace, number: int, mine: Gradients, microbatch: int) -> None:
        """Update shared weights by gradients that are complete here, for other stages to do the same."""
        group, versions = trace.stage.shared[number], trace.shared[number]
        step = trace.step(microbatch, versions)
        completed = SharedSum(trace.stage.prepared(mine, step), step.staleness)
        if trace.place.replica == 0:
            self._handed[group.holders, microbatch // self._microbatches] = completed
        with tf.control_dependencies(trace.begin_update(microbatch, versions)):
            group.apply(completed.gradients, step)

    def catch_up(self, trace: StageTrace, number: int, version: int) -> None:
        """Make the updates of a copy of shared weights up to a version, whose gradients another stage completes."""
        group, versions = trace.stage.shared[number], trace.shared[number]
        graph = tf.compat.v1.get_default_graph() if tf.inside_function() else None
        before: list[tf.Operation] = []
        while (minibatch := versions.version - trace.base) < version:
            completed, number_of_operations = self._handed[group.holders, minibatch], 0
            with tf.control_dependencies(before):
                if graph is not None:
                    number_of_operations = len(graph.get_operations())
                gradients = [moved(each, trace.device) for each in completed.gradients]
                begun = trace.begin_update(minibatch * self._microbatches, versions)
                with tf.control_dependencies(begun):
                    group.apply(gradients, Step(None, completed.staleness, trace.scale))
            if graph is not None:
                made = graph.get_operations()[number_of_operations:]
                before = [each for each in made if each.op_def.is_stateful]
