"""A minibatch's gradients while a program is traced: summed over replicas and stages, judged, and used by updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.backward import over_stages
from pipetrain.compute.functions.split import size_bytes, specs
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import Step
from pipetrain.compute.functions.weight_groups import WeightGroup
from pipetrain.compute.program.clock import Clock, Crossing
from pipetrain.compute.program.stage_trace import StageTrace, effects_from_here
from pipetrain.schemes.splitting import reduction_bytes, shared_out

Gradients = list[Any]


class Sums:
    """What the updates of all stages need of each other.

    Replicas sum their gradients, each about an r-th of them, in the order of the replicas, so that all have bitwise
    equal sums. Gradients of weights that several stages have are added from the last of these to the first, which
    completes them for all. Where the norm of all gradients counts, or whether they are finite, every stage learns it of
    every other, in the order of the stages.

    Args:
        traces: the replicas of every stage.
        scales: whether steps with gradients that are not finite are skipped.
        clock: notes when sums are there, if that is wanted.
        number_on: gives the number of the program's minibatch 0 on a device, where sums are compressed.

    ``sending`` are the names of operations, not of one device alone, for which devices' next actions need not wait.
    """

    def __init__(
        self,
        traces: Sequence[Sequence[StageTrace]],
        scales: bool,
        clock: Clock | None,
        number_on: Callable[[str], tf.Tensor] | None = None,
    ) -> None:
        self._traces, self._scales, self._clock, self._number_on = traces, scales, clock, number_on
        self._before: dict[tuple[int, int], list[tf.Operation]] = {}  # what a replica's next message waits for
        self.sending: dict[str, tf.Operation] = {}
        self._has_norm = bool(traces[0][0].stage.global_clipnorm)
        self._depend = scales or self._has_norm
        self._holders = [[group.holders for group in stage[0].stage.shared] for stage in traces]
        self._complete: dict[int, list[Gradients]] = {}
        self._of_replicas: dict[int, list[Gradients]] = {}  # of the minibatch under way
        self._judged: tuple[list[Any], list[Any]] | None = None

    def needed(self, stage: int) -> list[int]:
        """The stages whose gradients of the same minibatch the update of a stage needs."""
        if self._depend:
            return [*range(len(self._traces))]
        return sorted({stage, *chain.from_iterable(self._holders[stage])})

    def is_ready(self, stage: int, microbatch: int) -> bool:
        """Whether nothing else is needed for an update."""
        return True

    def has_work(self, trace: StageTrace) -> bool:
        """Whether an update is anything beside what the call of the last backward has done."""
        return not trace.has_updated or bool(trace.stage.shared)

    def update(self, trace: StageTrace, microbatch: int, ended: int | None = None) -> list[tf.Operation]:
        """Update the weights of a replica; gives what is to be waited for beside all stateful operations.

        A branch whose result nothing waits for is not taken. ``ended`` is the place of the time when the replica had
        all of its own gradients.
        """
        stage, replica = trace.place.stage, trace.place.replica
        gradients, step = self._completed(stage)[replica], trace.step(microbatch)
        if self._clock is not None and ended is not None:
            self._note(trace, gradients, microbatch, ended)
        squares, finite = self._judgement(trace)

        def apply() -> None:
            if not trace.has_updated:
                with tf.control_dependencies(trace.begin_update(microbatch)):
                    trace.stage.update(gradients, step, squares)
            for group in trace.stage.shared:
                completed = self._handed_down(group, step, squares)
                group.apply([moved(each, trace.device) for each in completed], step)

        trace.gathered = None
        if finite is None:
            apply()
            return []
        taken = tf.cond(finite, _done(apply, finite), lambda: tf.identity(finite))
        return [taken.op] if tf.inside_function() else []

    def _note(self, trace: StageTrace, gradients: Gradients, microbatch: int, ended: int) -> None:
        """Note the sums of which a replica has had a part, from its gradients being there to the sums."""
        stage, _, replica, replicas = trace.place
        clock, shared = self._clock, trace.stage.shared
        assert clock is not None
        present = [each for each in tf.nest.flatten(gradients, expand_composites=True) if each is not None]
        if not present or (replicas == 1 and not shared):
            return
        there = clock.add(clock.now([each.op for each in present], trace.device), trace.device)
        if replicas > 1:
            size = self._sent_bytes(stage, replica)
            clock.crossings.append(Crossing("R", microbatch, (stage, replica, stage, replica), ended, there, size))
        for group in shared if replica == 0 else ():
            size = sum(map(size_bytes, specs(group.variables)))
            above = [each for each in group.holders if each < stage][-1:]
            others = above or [each for each in group.holders if each > stage]
            for other in others:
                for r in range(len(self._traces[other])):
                    clock.crossings.append(Crossing("S", microbatch, (stage, 0, other, r), ended, there, size))

    def _sent_bytes(self, stage: int, replica: int) -> int:
        """What a replica sends the others of a stage's gradients, and of their sums."""
        first, replicas = self._traces[stage][0].stage, len(self._traces[stage])
        apart, like = others(first), specs(first.variables)
        sizes = {n: size_bytes(like[n]) for n in apart}
        owned = sum(sizes[n] for n in owners(first, apart, replicas)[replica])
        messages = 0 if first.sums is None else (replicas - 1) * first.sums.sent_bytes
        return reduction_bytes(sum(sizes.values()), owned, replicas) + messages

    def _completed(self, stage: int) -> list[Gradients]:
        """A stage's gradients at each of its replicas, those of shared weights summed over the later stages.

        They are None where an earlier stage completes them.
        """
        if stage in self._complete:
            return self._complete[stage]
        everyone = [list(each) for each in self._reduced(stage)]
        for trace, mine in zip(self._traces[stage], everyone, strict=True):
            for group in trace.stage.shared:
                total = self._over_stages(group.holders, stage, trace)
                for n, each in zip(group.numbers, total, strict=True):
                    mine[n] = each if stage == group.holders[0] else None
        self._complete[stage] = everyone
        return everyone

    def _over_stages(self, holders: Sequence[int], stage: int, trace: StageTrace) -> Gradients:
        """The gradients of shared weights summed over this stage and the later ones, on this replica's device."""
        (group,) = [each for each in trace.stage.shared if each.holders == tuple(holders)]
        reduced = self._reduced(stage)[trace.place.replica]
        mine = [reduced[n] for n in group.numbers]
        later = [each for each in holders if each > stage]
        if not later:
            return mine
        below = self._over_stages(holders, later[0], self._traces[later[0]][0])
        here = [moved(each, trace.device) for each in below]
        with tf.device(trace.device):
            return [over_stages(a, b) for a, b in zip(here, mine, strict=True)]

    def _handed_down(self, group: WeightGroup, step: Step, squares: Any) -> Gradients:
        """The complete gradients of shared weights, from the first stage that has them."""
        first = self._traces[group.holders[0]][0]
        (its,) = [each for each in first.stage.shared if each.holders == group.holders]
        complete = self._completed(group.holders[0])[0]
        with tf.device(first.device):
            mine = [complete[n] for n in its.numbers]
            return first.stage.prepared(mine, step, None if squares is None else moved(squares, first.device))

    def _reduced(self, stage: int, minibatch: int = 0) -> list[Gradients]:
        """The gradients of a stage of this minibatch, summed over its replicas, at each of these."""
        if stage not in self._of_replicas:
            traces = self._traces[stage]
            if len(traces) == 1:
                self._of_replicas[stage] = [traces[0].gathered or []]
            else:
                self._of_replicas[stage] = self._over_replicas(traces, minibatch)
        return self._of_replicas[stage]

    def _over_replicas(self, traces: Sequence[StageTrace], minibatch: int) -> list[Gradients]:
        first = traces[0].stage
        found = over_replicas(traces, others(first))
        if first.sums is not None:
            for mine, sent in zip(found, self._by_messages(traces, minibatch), strict=True):
                mine.update(sent)
        return [[mine[n] for n in range(len(mine))] for mine in found]

    def _by_messages(self, traces: Sequence[StageTrace], minibatch: int) -> list[dict[int, Any]]:
        """The sums of compressed gradients at each replica.

        A message leaves when its gradients are there and the replica's message of the minibatch before has been made.
        """
        sums, number_on = traces[0].stage.sums, self._number_on
        assert number_on is not None
        effects, messages, found = effects_from_here(), [], []
        with tf.control_dependencies(None):
            for replica, trace in enumerate(traces):
                gradients = sums.of_no_rows(replica) if trace.gathered is None else trace.gathered
                if gradients is not None:
                    key, of_message = (trace.place.stage, replica), effects_from_here()
                    with tf.device(trace.device), tf.control_dependencies(self._before.get(key, [])):
                        step = number_on(trace.device) + minibatch
                        messages.append(sums.encoded(replica, gradients, step))
                    self._before[key] = of_message()
            for replica, trace in enumerate(traces):
                there = [moved(each, trace.device) for each in messages]
                with tf.device(trace.device):
                    found.append(sums.added(replica, there, number_on(trace.device) + minibatch))
        self.sending |= {each.name: each for each in effects()}
        return found

    # What all stages learn of each other

    def _judgement(self, trace: StageTrace) -> tuple[Any, Any]:
        """The squared norms of all stages' gradients, and whether all are finite, on a device; None if not asked."""
        if not self._depend:
            return None, None
        norms, finite = self._summaries()
        with tf.device(trace.device):
            squares = tf.stack([moved(each, trace.device) for each in norms]) if norms else None
            all_finite = tf.reduce_all(tf.stack([moved(each, trace.device) for each in finite])) if finite else None
        return squares, all_finite

    def _summaries(self) -> tuple[list[Any], list[Any]]:
        """Of every stage the squared norm, and whether its gradients are finite, of its first replica."""
        if self._judged is None:
            norms, finite = [], []
            for stage, (first, *_) in enumerate(self._traces):
                gradients = self._completed(stage)[0]
                with tf.device(first.device):
                    if self._scales:
                        finite.append(first.stage.all_finite(gradients))
                    if self._has_norm:
                        norms.append(first.stage.squared_norm(gradients, Step(None, 0, first.scale)))
            self._judged = norms, finite
        return self._judged

    def all_finite(self, host: str) -> tf.Tensor | None:
        """Whether all gradients are, on this process's device; None if nobody asks."""
        if not self._scales:
            return None
        _, finite = self._summaries()
        return tf.reduce_all(tf.stack([moved(each, host) for each in finite]))


def others(stage: Stage) -> list[int]:
    """The numbers of a stage's weights whose gradients replicas do not send as messages."""
    coded = () if stage.sums is None else stage.sums.numbers
    return [n for n, _ in enumerate(stage.variables) if n not in coded]


def owners(stage: Stage, numbers: Sequence[int], replicas: int) -> list[list[int]]:
    """Which of so many replicas sums which of these gradients."""
    owned = shared_out([stage.variables[n].shape.num_elements() for n in numbers], replicas)
    return [[numbers[place] for place in mine] for mine in owned]


def over_replicas(traces: Sequence[StageTrace], numbers: Sequence[int]) -> list[dict[int, Any]]:
    """Each replica sums about an r-th of these gradients, and sends the sums to the others; by number."""
    sums: dict[int, Any] = {}
    for owner, mine in zip(traces, owners(traces[0].stage, numbers, len(traces)), strict=True):
        total: list[Any] | None = None
        for trace in traces:
            if trace.gathered is not None:
                share = [moved(trace.gathered[n], owner.device) for n in mine]
                with tf.device(owner.device):
                    total = owner.stage.accumulate(total, share, mine)
        sums.update(zip(mine, total or [], strict=True))
    return [{n: moved(sums[n], trace.device) for n in numbers} for trace in traces]


def moved(gradient: Any, device: str) -> Any:
    """A gradient on a device; None stays None."""
    with tf.device(device):
        return tf.nest.map_structure(
            lambda each: None if each is None else tf.identity(each), gradient, expand_composites=True
        )


def _done(call: Callable[[], None], given: tf.Tensor) -> Callable[[], tf.Tensor]:
    """A branch that makes the call, and gives what is given when that is done."""

    def branch() -> tf.Tensor:
        call()
        made = [each for each in tf.compat.v1.get_default_graph().get_operations() if each.op_def.is_stateful]
        with tf.control_dependencies(made):
            return tf.identity(given)

    return branch


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
        number_on: as that of ``Sums``.
    """

    def __init__(
        self,
        traces: Sequence[Sequence[StageTrace]],
        microbatches: int,
        clock: Clock | None,
        number_on: Callable[[str], tf.Tensor] | None = None,
    ) -> None:
        super().__init__(traces, False, clock, number_on)
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
        gradients = list(self._reduced(stage, microbatch // self._microbatches)[replica])
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
        before: list[tf.Operation] = []
        while (minibatch := versions.version - trace.base) < version:
            completed, effects = self._handed[group.holders, minibatch], effects_from_here()
            with tf.control_dependencies(before):
                gradients = [moved(each, trace.device) for each in completed.gradients]
                begun = trace.begin_update(minibatch * self._microbatches, versions)
                with tf.control_dependencies(begun):
                    group.apply(gradients, Step(None, completed.staleness, trace.scale))
            before = effects()
