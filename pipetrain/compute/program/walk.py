"""The walk through a program that traces its function: each action a call on its device, after the one before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_function import joined_loss
from pipetrain.compute.functions.stage_values import BoundaryTensors, joined_rows
from pipetrain.compute.program.arguments import (
    FIRST,
    LAST,
    Arguments,
    MinibatchResult,
    ProgramResult,
    Settings,
)
from pipetrain.compute.program.clock import Clock, Timed
from pipetrain.compute.program.sending import Sending
from pipetrain.compute.program.stage_trace import ForwardMessage, HeldStage, StagePlace, StageTrace, effects_from_here
from pipetrain.compute.program.sums import LateSums, Sums
from pipetrain.compute.transfers.compression import messages_of_cuts
from pipetrain.schemes.actions import FROM_ABOVE, FROM_BELOW, OPERATIONS, Action
from pipetrain.schemes.programs import Call, Program
from pipetrain.schemes.scheme import Scheme
from pipetrain.trace.records import What

SENDS_UP = frozenset(op for op, operation in OPERATIONS.items() if "input gradients" in operation.makes)
BOTH = frozenset({"FB", "FI"})
Failed = Callable[[Exception, StagePlace, Call], None]


class Named(NamedTuple):
    """A call by the name under which TensorFlow knows it.

    ``number``: which of its replica's calls of forward and backward together it is, None if it is none.
    """

    place: StagePlace
    actions: Call
    number: int | None


class Held(NamedTuple):
    """What one function of a course leaves for the next one, minibatches counted from the next one's first."""

    sent: dict[tuple[What, int, int, int], Any]
    stages: list[HeldStage]
    sums: Any


class _Unit:
    """What one schedule's device has of one replica: its stages, its calls, and the last operations traced of it."""

    def __init__(self, calls: Sequence[Call], stages: dict[int, StageTrace]) -> None:
        self.calls, self.stages = list(calls), stages
        self.at = 0
        self.last: list[tf.Operation] = []
        self.timed: int | None = None  # the number of its last action whose times are noted

    @property
    def call(self) -> Call | None:
        """The next one."""
        return self.calls[self.at] if self.at < len(self.calls) else None

    @property
    def trace(self) -> StageTrace:
        """The stage whose call is next."""
        return self.stages[self.calls[self.at][0].stage]

    @property
    def before_update(self) -> Call:
        """The action that has completed the gradients of the stage whose update is next: people know it by that."""
        stage = self.calls[self.at][0].stage
        *_, call = (each for each in self.calls[: self.at] if each[0].stage == stage and each[-1].updates)
        return (call[-1]._replace(op="B" if call[-1].op == "FB" else call[-1].op),)

    def updates(self) -> list[tuple[StagePlace, int]]:
        """The next calls, as far as they are updates: of which stage, and by which microbatch's minibatch."""
        following = takewhile(lambda call: call[0].op == "U", islice(self.calls, self.at, None))
        return [(self.stages[action.stage].place, action.microbatch) for (action,) in following]

    @property
    def is_before_update(self) -> bool:
        """Whether the update of the stage whose call is next follows it."""
        (action, *_), follows = self.calls[self.at], self.calls[self.at + 1 : self.at + 2]
        return bool(follows) and follows[0][0].op == "U" and follows[0][0].stage == action.stage


class Walk:
    """One walk: devices in turns, each as far as what it needs of others has been traced.

    Every call waits for the call before it on its device and for its inputs, and nothing else orders operations.

    Args:
        stages: the replicas of every stage.
        scheme: which weights are read, and where stages are.
        program: what devices do.
        arguments: of the function.
        settings: of the function.
        failed: told of an error in tracing a call.

    ``calls`` are all of them by their names, ``clock`` says what the times of a result are of, ``held_specs`` are
    those of what is left for the next function of a course, and ``kept`` says of which minibatch and stage weights are.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Stage]],
        scheme: Scheme,
        program: Program,
        arguments: Arguments,
        settings: Settings,
        failed: Failed,
    ) -> None:
        self._stages, self._scheme, self._program = stages, scheme, program
        self._arguments, self._settings, self._failed = arguments, settings, failed
        self._count, self._is_late = settings.microbatches, scheme.asynchronous
        self.calls: dict[str, Named] = {}
        self.clock: Clock | None = None
        self.held_specs: Any = None
        self.kept: list[tuple[int, int]] = []

    @property
    def entrances(self) -> tuple[str, str]:
        """Where inputs and rates go in, and where labels and sample weights do."""
        return self._arguments.entrance(FIRST), self._arguments.entrance(LAST)

    def _placed(self) -> list[list[tuple[int, int]]]:
        """What each unit has: the stages, and which replica of them."""
        schedule, count = self._scheme.schedule, len(self._stages)
        on = [schedule.stages_on(device, count) for device in range(len(self._program.calls))]
        return [[(k, r) for k in mine] for mine in on for r in range(len(self._stages[mine[0]]))]

    def body(
        self,
        x: Sequence[list[tf.Tensor]],
        targets: Sequence[Any],
        numbers: list[tf.Tensor],
        rates: tf.Tensor | None = None,
        held: Held | None = None,
        number: tf.Tensor | None = None,
    ) -> ProgramResult:
        """The program's operations, for the inputs and the targets of those minibatches of which something goes in.

        ``number`` is that of its minibatch 0, where anything is compressed.
        """
        self._arguments.give(numbers)
        is_open = any(None in each.shape[1:] for each in tf.nest.flatten(self._stages[0][0].segment.inputs))
        self.calls, self.clock = {}, Clock(self._settings.host, is_open) if self._settings.is_timed else None
        self._complete, self._runs = set[tuple[StagePlace, int]](), Counter[StagePlace]()
        with tf.device(self.entrances[0]):
            known = {} if rates is None else dict(zip(self._settings.parts, tf.unstack(rates), strict=True))
        self._snapshots: dict[tuple[int, int], list[Any]] = {}
        self._x, self._targets = self._arguments.divided(x, FIRST), self._arguments.divided(targets, LAST)
        devices = [[replica.device for replica in stage] for stage in self._stages]
        cuts = messages_of_cuts(self._scheme.compression, [replica for replica, *_ in self._stages])
        self._sending = Sending(devices, self._settings, self._arguments, self.clock, cuts, number)
        self._traces = [
            [self._begun(k, r, replica, known) for r, replica in enumerate(stage)]
            for k, stage in enumerate(self._stages)
        ]
        if self._is_late:
            self._sums: Sums = LateSums(self._traces, self._count, self.clock, self._sending.number_on)
        else:
            self._sums = Sums(self._traces, self._settings.scale is None, self.clock, self._sending.number_on)
        if held is not None:
            self._resume(held)
        units = self._units()
        while any(unit.call for unit in units):
            before = sum(unit.at for unit in units)
            for n, unit in enumerate(units):
                self._go_on(unit, n)
            if before == sum(unit.at for unit in units):
                raise RuntimeError(f"No device can go on. Received: {[str(unit.call) for unit in units]}.")
        return self._result(units)

    def _begun(self, k: int, r: int, replica: Stage, rates: Mapping[int, Any]) -> StageTrace:
        """A replica at the beginning, when its state is that of its variables."""
        replica.read_state()
        place = StagePlace(k, len(self._stages), r, len(self._stages[k]))
        with tf.device(replica.device):
            scale = self._arguments.scale(replica.device)
        share = partial(self._arguments.share, k, r)
        return StageTrace(place, replica, self._scheme, self._count, share, scale, self._settings.base, rates)

    def _resume(self, held: Held) -> None:
        """Go on with what the function before has left."""
        self._sending.resume(held.sent)
        for mine, each in zip(chain.from_iterable(self._traces), held.stages, strict=True):
            mine.resume(each)
        if isinstance(self._sums, LateSums):
            self._sums.resume(held.sums)

    def _left(self) -> Held:
        """What the next function goes on with, minibatches counted from the first one whose result it gives."""
        since, late = self._settings.results.stop, self._sums
        by = since * self._count
        sent = {(op, stage, r, m - by): values for (op, stage, r, m), values in self._sending.held().items()}
        assert isinstance(late, LateSums)
        return Held(sent, [each.held(since) for each in chain.from_iterable(self._traces)], late.held(since))

    def _units(self) -> list[_Unit]:
        placed = self._placed()
        devices = [device for device, _ in enumerate(self._program.calls) for _ in range(self._replicas_on(device))]
        return [
            _Unit(self._program.calls[device], {k: self._traces[k][r] for k, r in mine})
            for device, mine in zip(devices, placed, strict=True)
        ]

    def _replicas_on(self, device: int) -> int:
        return len(self._stages[self._scheme.schedule.stages_on(device, len(self._stages))[0]])

    def _go_on(self, unit: _Unit, number: int) -> None:
        """Trace a device's calls, as long as they are ready."""
        while (call := unit.call) is not None:
            self._complete |= {(each, m // self._count) for each, m in unit.updates()}
            if not self._is_ready(call[0]):
                return
            name = f"action_{number}_{unit.at}"
            told = unit.before_update if call[0].op == "U" else call
            self.calls[name] = Named(unit.trace.place, told, self._number(call, unit.trace.place))
            try:
                self._perform(unit, call, name)
            except Exception as error:
                self._failed(error, unit.trace.place, told)
                raise
            unit.at += 1

    def _is_ready(self, action: Action) -> bool:
        op, stage, microbatch = action
        if op == "U":
            needed = self._sums.needed(stage)
            return self._are_complete(needed, microbatch) and self._sums.is_ready(stage, microbatch)
        if op in FROM_ABOVE and stage > 0:
            return self._sending.is_made("F", stage - 1, microbatch)
        if op in FROM_BELOW and stage < len(self._stages) - 1:
            return self._sending.is_made("B", stage + 1, microbatch)
        return True

    def _are_complete(self, stages: Sequence[int], microbatch: int) -> bool:
        """Whether all replicas of stages have all weight gradients of the minibatch, of which this is the last one."""
        minibatch = microbatch // self._count
        return all((each.place, minibatch) in self._complete for stage in stages for each in self._traces[stage])

    def _received(self, call: Call, place: StagePlace) -> Any:
        """What a call takes of the stage before or after, on its device as soon as it is there."""
        op, stage, microbatch = call[0]
        if op in FROM_ABOVE:
            if stage > 0:
                return self._sending.from_above(place, microbatch)
            x = self._x.get((microbatch, place.replica))
            return ForwardMessage(None if x is None else BoundaryTensors(x, [None] * len(x)), None)
        return self._sending.from_below(place, microbatch) if op in FROM_BELOW and not place.is_last else None

    def _perform(self, unit: _Unit, call: Call, name: str) -> None:
        """Trace a call after the one before it on its device; what it leaves is there for others."""
        trace, is_update, version = unit.trace, call[0].op == "U", unit.trace.version
        received = self._received(call, trace.place)
        with tf.device(trace.device), tf.name_scope(name):
            begun = None
            has_work = not is_update or self._sums.has_work(trace) or self._is_kept(call[0])
            if self.clock and has_work:
                inputs = [each.op for each in tf.nest.flatten(received) if each is not None]
                begun = self.clock.now([*unit.last, *inputs], trace.device)
            awaited = unit.last if begun is None else [begun.op]
            effects, middle, branches = effects_from_here(), None, list[tf.Operation]()
            if self._is_late and not is_update:
                awaited = self._caught_up(trace, call, awaited)
            with tf.control_dependencies(awaited):
                if not is_update:
                    middle = self._made_by(call, trace, received, self._updates_within(unit, call))
                else:
                    ended = self.clock.actions[unit.timed].end if self.clock and unit.timed is not None else None
                    branches = self._sums.update(trace, call[0].microbatch, ended)
            made = [each for each in effects() if each.name not in self._sums.sending]
            unit.last = [*made, *branches] or awaited
            if is_update and self._is_kept(call[0]):
                self._keep(unit, call[0].microbatch // self._count)
            if self.clock and begun is not None:
                end = self.clock.now(unit.last, trace.device)
                unit.last = [end.op]
                self._note(unit, call, version, (begun, middle, end))

    def _caught_up(self, trace: StageTrace, call: Call, awaited: list[tf.Operation]) -> list[tf.Operation]:
        """Let the stage's copies of shared weights be what the call finds."""
        sums, (op, _, microbatch) = self._sums, call[-1]
        assert isinstance(sums, LateSums)
        for group, shared in enumerate(trace.stage.shared):
            ways = [way == "backward" for way in OPERATIONS[op].reads]
            versions = [trace.found(group, microbatch, way) for way in ways]
            if shared.holders[0] != trace.place.stage and versions:
                awaited = self._after(awaited, partial(sums.catch_up, trace, group, max(versions)))
        return awaited

    def _after(self, awaited: list[tf.Operation], call: Callable[[], None]) -> list[tf.Operation]:
        """What is to be waited for after a call that waits for these operations."""
        effects = effects_from_here()
        with tf.control_dependencies(awaited):
            call()
        return effects() or awaited

    def _is_kept(self, action: Action) -> bool:
        """Whether weights are kept after an update."""
        return action.microbatch // self._count in self._settings.snapshots

    def _keep(self, unit: _Unit, minibatch: int) -> None:
        """Keep the weights and the state of a stage after an update."""
        trace, effects = unit.trace, effects_from_here()
        if trace.place.replica == 0:
            with tf.control_dependencies(unit.last):
                self._snapshots[minibatch, trace.place.stage] = trace.stage.snapshot()
            unit.last = effects() or unit.last

    def _number(self, call: Call, place: StagePlace) -> int | None:
        if call[0].op not in BOTH:
            return None
        self._runs[place] += 1
        return self._runs[place] - 1

    def _updates_within(self, unit: _Unit, call: Call) -> bool:
        """Whether the call updates the stage's own weights, too: nobody waits for anything else of it first.

        Other replicas and stages need the gradients, and in a synchronous scheme the stage above, which is idle, its
        own. With one microbatch it is not sent them first: the gradients of all weights would be in memory at once.
        """
        place = unit.trace.place
        is_awaited = call[0].op in SENDS_UP and place.stage > 0 and self._count > 1 and not self._is_late
        depends = self._program.together or bool(unit.trace.stage.global_clipnorm)
        is_alone = place.replicas == 1 and not depends
        wanted = self._settings.updates and unit.is_before_update and is_alone and not is_awaited
        return wanted and bool(unit.trace.stage.variables)

    def _made_by(self, call: Call, trace: StageTrace, received: Any, updates: bool) -> Any:
        """Trace a call that is no update; gives the time when a forward in it was finished, if that is known."""
        (op, _, microbatch), place, middle = call[0], trace.place, None
        targets = self._targets.get((microbatch, place.replica)) if place.is_last else None
        returned: Any = None
        if op == "F":
            self._sending.make("F", place, microbatch, trace.forward(microbatch, received, targets))
        elif op == "B":
            returned = trace.backward(microbatch, received, updates)
        elif op == "I":
            returned = trace.input_gradients(microbatch, received)
        elif op == "W":
            trace.weight_gradients([each.microbatch for each in call], updates)
        else:
            returned, middle = trace.forward_backward(microbatch, received, targets, op == "FI", updates)
        if op in SENDS_UP:
            self._sending.make("B", place, microbatch, returned)
        return middle

    def _note(self, unit: _Unit, call: Call, version: int, times: tuple[Any, Any, Any]) -> None:
        """Remember where the times of a call's actions are; several W share theirs, an update ends the one before.

        ``times`` are those of its begin, of its middle, if that is known, and of its end.
        """
        begun, middle, end = times
        clock, trace, action = self.clock, unit.trace, call[0]
        assert clock is not None
        device, replica = trace.device, trace.place.replica
        if action.op == "U":
            if unit.timed is not None:
                clock.ends(unit.timed, end, device)
            return
        first, last = clock.add(begun, device), clock.add(end, device)
        if action.op in BOTH:
            between = last if middle is None else clock.add(middle, device)
            second = action._replace(op="B" if action.op == "FB" else "I")
            clock.actions.append(Timed(action._replace(op="F"), device, replica, version, first, between))
            clock.actions.append(Timed(second, device, replica, version, between, last))
        else:
            clock.actions += [Timed(each, device, replica, version, first, last) for each in call]
        unit.timed = len(clock.actions) - 1
        way: What = "B" if action.op in SENDS_UP else "F"
        self._sending.made_at(way, trace.place, action.microbatch, last)

    def _result(self, units: Sequence[_Unit]) -> ProgramResult:
        """What the function gives when all of it is done."""
        every = [*chain.from_iterable(self._traces)]
        owner = {trace.place: unit for unit in units for trace in unit.stages.values()}
        if self._is_late and self._settings.drains:
            for trace in every:
                self._catch_up_all(trace, owner[trace.place])
        for trace in every if self._settings.keeps_state else ():
            unit = owner[trace.place]
            with tf.device(trace.device), tf.control_dependencies(unit.last):
                unit.last = [*unit.last, *trace.stage.written_state()]
        flat: list[tf.Tensor] = []
        if not self._settings.drains:
            held = self._left()
            leaves = tf.nest.flatten(held, expand_composites=True)
            flat = [each for each in leaves if isinstance(each, tf.Tensor)]
            self.held_specs = tf.nest.map_structure(_spec_of, held)
        host = self._settings.host
        with tf.device(host):  # one operation for all that the results wait for, since devices tell each other of each
            waited = [*chain.from_iterable(unit.last for unit in units), *self._sums.sending.values()]
            after = [tf.group(*waited)] if tf.inside_function() else []
        minibatches = [self._result_of(minibatch, after) for minibatch in self._settings.results]
        with tf.device(host):
            finite, times = self._sums.all_finite(host), self.clock.times() if self.clock else None
            if not minibatches and after:  # somebody has to wait for what has no results
                with tf.control_dependencies(after):
                    times = tf.identity(times if times is not None else tf.zeros([0], tf.float64))
        sizes = self.clock.sizes() if self.clock else None
        self.kept = sorted(self._snapshots)
        snapshots = [self._snapshots[each] for each in self.kept]
        return ProgramResult(minibatches, finite, times, sizes, snapshots, flat)

    def _catch_up_all(self, trace: StageTrace, unit: _Unit) -> None:
        """In the end all copies of shared weights are equal."""
        sums = self._sums
        assert isinstance(sums, LateSums)
        with tf.device(trace.device):
            for group, shared in enumerate(trace.stage.shared):
                if shared.holders[0] != trace.place.stage:
                    unit.last = self._after(unit.last, partial(sums.catch_up, trace, group, trace.version))

    def _result_of(self, minibatch: int, after: Sequence[tf.Operation]) -> MinibatchResult:
        traces, first = self._traces[-1], minibatch * self._count
        numbers = range(first, first + self._count)
        done = [trace.outputs[m] for m in numbers for trace in traces if m in trace.outputs]
        with tf.device(traces[0].device):  # so that one message has all of them
            losses = [(each.loss, each.share.of_loss) for each in done]
            penalties = [(each.penalty, each.share.of_minibatch) for each in done if each.penalty is not None]
            loss, predictions = joined_loss(losses, penalties), joined_rows([each.predictions for each in done])
        with tf.device(self._settings.host):
            with tf.control_dependencies(list(after)):
                loss = tf.identity(loss)
            predictions = tf.nest.map_structure(lambda each: each if each is None else tf.identity(each), predictions)
        return MinibatchResult(loss, predictions)


def _spec_of(value: Any) -> Any:
    """The spec of a tensor, or anything else as it is."""
    if isinstance(value, tf.Tensor):
        return tf.TensorSpec(value.shape, value.dtype)
    return tf.type_spec_from_value(value) if tf.is_tensor(value) else value
