"""Runs a pipeline that does not flush by functions over all devices, each a slice of its course."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import HOST
from pipetrain.compute.functions.kernels import gc_paused
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import KeptStage
from pipetrain.compute.program.arguments import ProgramResult, Settings
from pipetrain.compute.program.clock import ProgramTimes
from pipetrain.compute.program.function import ProgramFunction, ProgramInputs, traced
from pipetrain.run.collector import InFlight, Kept, Result, Snapshot
from pipetrain.run.control import Caller, RunSettings
from pipetrain.run.pipeline import RESTING
from pipetrain.run.program_runner import ProgramRunner
from pipetrain.schemes import policies
from pipetrain.schemes.programs import Course, Program
from pipetrain.schemes.schedules import asynchronous
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.weight_versions import WeightVersions

QUEUED = 2  # calls that are begun before the results of the first one are taken: one is made, the next one waits
KEPT_RATES, KEPT_FUNCTIONS = 16, 64
BROKEN = "A call is not made after one that has failed."


class Posted(NamedTuple):
    """A minibatch: its data, until they have gone in, its rows, and its learning rate."""

    x: list[tf.Tensor] | None
    targets: Any
    rows: int
    rate: float | None


class Slice(NamedTuple):
    """One call: the number of its program's minibatch 0 and of how many minibatches it gives results.

    ``slices`` are those of the course up to this one, as ``InFlight`` has them.
    """

    base: int
    results: int
    program: Program
    function: ProgramFunction
    times: ProgramTimes
    given: ProgramInputs
    settings: Settings
    held_specs: Any
    slices: list[tuple[int, int | None]]


class CourseRunner(ProgramRunner):
    """A pipeline that never flushes, in calls of functions that follow each other.

    What is in flight when a call ends is what the next one begins with: tensors that stay where they are. A thread
    makes the calls, so that devices work on while the caller takes results and posts the next minibatches.

    Args:
        stages: the replicas of every stage in order.
        scheme: order of actions and choice of weights.
        microbatches: how many a minibatch is split into.
        settings: called whenever the weights are taken from the model.

    ``minibatches`` is how many a call has; no more than ``most_ahead`` minibatches are posted ahead, if that is given.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Stage]],
        scheme: Scheme,
        microbatches: int,
        settings: Callable[[], RunSettings] = RunSettings,
    ) -> None:
        super().__init__(stages, scheme, microbatches, settings)
        count = len(self._stages)
        self._versions = [
            WeightVersions(scheme, k, count, microbatches, _nothing, _nothing, first)
            for k, (stage, *_) in enumerate(self._stages)
            for first in (None, *(min(group.holders) for group in stage.shared))
        ]
        # Built-in policies read the same weights of every minibatch once such a pipeline has long been full.
        is_known = type(scheme.policy).__module__ == policies.__name__
        self._settles = is_known and scheme.schedule.order is asynchronous
        self._specs: dict[str, Any] = {}  # what functions leave for the next one, each kind once
        self._rates: dict[tuple[float, ...], tf.Tensor] = {}
        self.minibatches = 1  # of a call
        self.most_ahead: int | None = None
        self._is_resting = False
        self._begin()

    def _begin(self) -> None:
        """Nothing is in flight."""
        self._course: Course | None = None
        self._posted: dict[int, Posted] = {}
        self._count_posted = 0
        self._calls = deque[tuple[Slice, Future[ProgramResult]]]()
        self._caller: Caller | None = None
        self._is_broken, self._is_stopping = False, False
        self._error: Exception | None = None  # of a call, named
        self._held: Sequence[tf.Tensor] = ()  # what the last call has left
        self._held_specs: Any = None  # of what the last call will leave that was begun
        self._left_specs: Any = None  # of what the last call has left that was taken
        self._slices: list[tuple[int, int | None]] = []  # of calls that were begun, see ``InFlight``
        self._slices_taken: list[tuple[int, int | None]] = []
        self._made_calls = self._taken_calls = 0
        self._asked: Future[tuple[int, list[list[KeptStage]], Sequence[tf.Tensor]]] | None = None
        self._parts_of_snapshots: dict[int, dict[int, list[Any]]] = {}
        self._kept = deque[tuple[int, Snapshot]]()  # complete ones, and after how many updates
        self._results_taken = 0

    @property
    def window(self) -> int:  # type: ignore[override]
        """How many minibatches may be posted ahead of the results taken: for a call that is made, and the next one."""
        ahead = QUEUED * self.minibatches + math.ceil(len(self._stages) / self._microbatches) + 1
        return ahead if self.most_ahead is None else min(ahead, self.most_ahead)

    def post(self, x: list[tf.Tensor], y: Any, sample_weight: Any, learning_rate: float | None) -> None:
        """Send a minibatch on its way."""
        self._check()
        settings = self._run or self._start()
        if self._course is None:
            self._course = self._new_course(settings)
        if self._caller is None:
            self._caller = Caller(self._lost)
            self._caller.start()
        before = self._posted.get(self._count_posted)  # as it was posted in the run that goes on
        rate = learning_rate if before is None else before.rate
        self._posted[self._count_posted] = Posted(x, (y, sample_weight), int(x[0].shape[0]), rate)
        self._count_posted += 1
        self._go_on(settings)

    def _new_course(self, settings: RunSettings) -> Course:
        apart = settings.exact_times or any(each.changed for each in self._stages[-1])
        return Course(self._scheme.schedule, len(self._stages), self._microbatches, apart)

    def drain(self) -> None:
        """Let everything in flight finish, and write the weights back. Raises what a stage raised."""
        if self._is_stopping and self._run is not None:  # an interrupt cut an abort short
            self.abort(store=True)
            return
        if self._is_resting and self._run is not None:
            raise RuntimeError(RESTING)
        super().drain()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """During the context no call is made; what is in flight stays in flight."""
        self._settle()
        self._is_resting = True
        try:
            yield
        finally:
            self._is_resting = False

    def _settle(self) -> None:
        """Wait until all calls that were begun have ended, whatever they came to."""
        for _, made in self._calls:
            self._wait(made)

    def _wait(self, made: Future[Any]) -> None:
        assert self._caller is not None  # as long as there are calls
        self._caller.wait(made)

    def _check(self) -> None:
        """Raise what a call has raised."""
        if self._error is not None:
            raise self._error

    def _go_on(self, settings: RunSettings) -> None:
        """Begin calls for which all minibatches have come."""
        course = self._course
        assert course is not None
        while len(self._calls) < QUEUED:
            until = course.results + self.minibatches
            if not course.results:  # the pipeline fills, in one function instead of several that are used once
                while until < self.minibatches + len(self._stages) and course.needs(until + 1) <= self.window:
                    until += 1
            if course.needs(until) > self._count_posted:
                return
            self._call(course.results, self._sliced(course, until), settings, drains=False)

    def _sliced(self, course: Course, until: int) -> Program:
        """The next slice, up to so many results."""
        self._slices = _with_slice(self._slices, until, course.needs(until), self._count_posted)
        return course.slice(until, self._count_posted)

    def result(self) -> Result:
        """The next minibatch's loss and predictions, in order; waits for them. Raises what a stage raised."""
        while not self._results:
            self._check()
            settings, course = self._run, self._course
            assert settings is not None and course is not None  # as long as a minibatch has no result
            if not self._calls:
                self._call(course.results, self._sliced(course, self._count_posted), settings, drains=False)
            self._take(settings)
            self._go_on(settings)
        self._results_taken += 1
        self._hand_out(self._results_taken)
        return self._results.popleft()

    def _hand_out(self, updates: int) -> None:
        """Let the weights be seen that were kept after so many updates: not before the step's own result."""
        while self._kept and self._kept[0][0] <= updates:
            self.snapshots.append(self._kept.popleft()[1])

    def _rest(self) -> None:
        """Let everything in flight finish."""
        self._check()
        settings, course = self._run, self._course
        if settings is None or course is None:
            return
        while self._calls:
            self._take(settings)
        base, program = course.results, course.rest(self._count_posted)
        if program.all_actions():
            self._call(base, program, settings, drains=True)
            self._take(settings)
        self._steps_done = self._count_posted
        self._hand_out(self._count_posted)
        self._stop()

    def _stop(self) -> None:
        """No call is begun any more, and the one that is made has ended."""
        self._is_stopping = True
        if self._caller is not None:
            self._caller.end()
            for each, made in self._calls:
                if made.done() and not made.cancelled() and made.exception() is None:
                    self._note_versions(each)
        self._begin()

    # One call

    def _call(self, base: int, program: Program, settings: RunSettings, drains: bool) -> None:
        """Begin a call, whose program's minibatch 0 has this number."""
        course, caller = self._course, self._caller
        assert course is not None and caller is not None
        results = course.results - base
        numbers = {action.microbatch // self._microbatches for action in program.all_actions()}
        reach = len(self._stages) if any(each.shared for each in self._every) else 0  # shared weights come later
        first = max(-base, min(numbers, default=0) - reach)
        mine = {i: self._posted[base + i] for i in range(first, max(numbers, default=0) + 1)}
        rows = {i: each.rows for i, each in mine.items()}
        has_rates = all(each.rate is not None for each in mine.values())
        of_call = self._settings_of(rows, settings)._replace(
            base=base,
            results=range(results),
            snapshots=self._wanted_snapshots(base, program, settings),
            drains=drains,
            has_rates=has_rates,
        )
        given = ProgramInputs(
            [mine[i].x or [] for i in program.entering(0, self._microbatches)],
            [mine[i].targets for i in program.entering(len(self._stages) - 1, self._microbatches)],
            rows,
            self._scale.scale,
            self._rates_of([each.rate or 0.0 for each in mine.values()]) if has_rates else None,
        )
        function, times = self._function_of(given, program, of_call, settings)
        made = Slice(base, results, program, function, times, given, of_call, self._held_specs, self._slices)
        self._held_specs = self._known(function.held_specs)
        self._calls.append((made, caller.submit(self._made, function, given)))
        for i in range(self._results_taken, base + results):
            self._posted[i] = self._posted[i]._replace(x=None, targets=None)
        while next(iter(self._posted)) < base - 4 * (len(self._stages) + self.minibatches):
            del self._posted[next(iter(self._posted))]

    def _made(self, function: ProgramFunction, given: ProgramInputs) -> ProgramResult:
        """Make a call, in the thread that makes all of them."""
        self._keep_if_asked()
        if self._is_broken:
            raise RuntimeError(BROKEN)
        try:
            result = function(given._replace(held=self._held))
        except BaseException:
            self._is_broken = True
            raise
        self._held = result.held
        self._made_calls, self._last_made = self._made_calls + 1, result
        return result

    def kept(self) -> Kept:
        """What the devices hold between two calls: after the one that is made now, if any is; training goes on.

        It is taken by the thread that makes the calls, before it makes the next one, which then is on its way.
        """
        self._check()
        settings, caller = self._run, self._caller
        assert settings is not None and caller is not None  # while the weights are on the devices
        asked = self._asked = Future()
        caller.submit(self._keep_if_asked)  # where no call is to come
        try:
            self._wait(asked)
            number, stages, held = asked.result()
        except RuntimeError:
            while self._calls:  # the one that has failed tells of it
                self._take(settings)
            raise
        while self._taken_calls < number:
            self._take(settings)
        numbers = sorted(self._posted)
        posted = [(i, self._posted[i].rows, self._posted[i].rate) for i in numbers]
        parts, snapshots = {i: dict(each) for i, each in self._parts_of_snapshots.items()}, list(self._kept)
        results = list(self._results)
        left = InFlight(self._slices_taken, posted, self._left_specs, list(held), results, parts, snapshots)
        return Kept(stages, self._results_taken, left, self.minibatches)

    def _keep_if_asked(self) -> None:
        """Give what the devices hold to who has asked for it; in the thread that makes the calls."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        try:
            if self._is_broken:
                raise RuntimeError(BROKEN)
            if self._made_calls:
                for each in (self._last_made.times, *(done.loss for done in self._last_made.minibatches[-1:])):
                    np.asarray(each)  # where it is there, the call is over on all devices
            asked.set_result((self._made_calls, self._kept_stages(), self._held))
        except BaseException as error:
            asked.set_exception(error)

    def _load(self, settings: RunSettings) -> None:
        super()._load(settings)
        if settings.kept is not None and settings.kept.in_flight is not None:
            self._resume(settings, settings.kept.taken, settings.kept.in_flight)

    def _resume(self, settings: RunSettings, taken: int, left: InFlight) -> None:
        """Go on with what is in flight. Minibatches whose results no step has taken are posted again."""
        course = self._course = self._new_course(settings)
        for results, posted in left.slices:
            while course.results < results:  # after the first one in slices of a size, which are soon like each other
                left_of = results - course.results
                until = course.results + (left_of % self.minibatches or self.minibatches)
                course.slice(until, course.needs(until)) if posted is None else course.slice(results, posted)
        self._slices = self._slices_taken = left.slices
        self._held, self._held_specs = left.held, self._known(left.specs)
        self._left_specs = self._held_specs
        self._posted = {i: Posted(None, None, rows, rate) for i, rows, rate in left.posted}
        self._count_posted = self._results_taken = taken
        self._results.extend(left.results)
        self._parts_of_snapshots = {i: dict(each) for i, each in left.parts.items()}
        self._kept.extend(left.snapshots)

    def _take(self, settings: RunSettings) -> None:
        """Wait for the next call that was begun, and take what comes of it."""
        each, made = self._calls[0]
        self._wait(made)
        try:
            result = made.result()
        except Exception as error:
            self._error = error  # who asks later is told the same
            if not isinstance(error, tf.errors.OpError):
                raise
            given = each.given._replace(held=self._held)
            of_call = each.function, given, each.program, each.settings, each.base, each.held_specs
            self._error = self._explained(error, *of_call)
            raise self._error from None
        self._calls.popleft()
        self._taken_calls, self._slices_taken = self._taken_calls + 1, each.slices
        self._left_specs = self._known(each.function.held_specs)
        self._results.extend(Result(done.loss, done.predictions) for done in result.minibatches)
        self._note(each.times, result, self.made + each.base, each.given.rows, settings.is_traced)
        self._count_runs(each.function)
        self._note_versions(each)
        self._collect(each, result.snapshots, settings)

    def _note_versions(self, each: Slice) -> None:
        """How many updates all stages have made when a call has ended."""
        held = each.function.held_specs
        if held is not None:
            base = each.base + each.results
            self._steps_done = base + min(stage.versions[0].version for stage in held.stages)

    def _rates_of(self, rates: list[float]) -> tf.Tensor:
        key = tuple(rates)
        if key not in self._rates:
            if len(self._rates) >= KEPT_RATES:
                self._rates.clear()
            with tf.device(HOST):
                self._rates[key] = tf.constant(rates, tf.float32)
        return self._rates[key]

    def _known(self, specs: Any) -> Any:
        """The first of equal specs: functions are known by what they begin with."""
        return self._specs.setdefault(repr(specs), specs)

    def _function_of(
        self, given: ProgramInputs, program: Program, of_call: Settings, settings: RunSettings
    ) -> tuple[ProgramFunction, ProgramTimes]:
        """The function of a slice, which is traced for the first of the same form."""
        forms = tuple(self._form_of(parts.rows) for parts in of_call.parts.values())
        same = of_call._replace(parts=forms, base=0)  # type: ignore[arg-type]
        key = program, same, id(self._held_specs), self._reads(of_call), settings.exact_times
        if key not in self._functions:
            if self._has_compiled:
                self._settle()  # they leave what the function begins with
            if not self._is_broken:
                first, specs = given._replace(held=self._held), self._held_specs
                self._lost.unless_lost(lambda: self._rehearse(first, program, of_call, of_call.base, specs))
                self._leave_out_calls()
            with gc_paused():
                of_program = self._stages, self._scheme, program, self.traced_for, of_call
                function = traced(*of_program, self._failed_in(of_call.base), self._held_specs)
            if len(self._functions) >= KEPT_FUNCTIONS:
                del self._functions[next(iter(self._functions))]
            self._functions[key] = function, ProgramTimes(function.clock, self._microbatches, self._replicas)
        return self._functions[key]

    def _leave_out_calls(self) -> None:
        """Forwards that were counted of calls whose results are not taken are counted again when they are."""
        for each, _ in self._calls if self._has_compiled else ():
            for place, count in each.function.runs.items():
                self._ran[place] = self._ran.get(place, 0) - count

    def _reads(self, of_call: Settings) -> Any:
        """What is read of all minibatches that matter to a function: another one is made where it is other versions."""
        count, base = len(self._stages), of_call.base
        if self._settles and base + min(of_call.parts) >= 4 * count:
            return None
        first = base + min(of_call.parts)
        numbers = range(first * self._microbatches, (base + max(of_call.parts) + 2 * count + 1) * self._microbatches)
        return tuple(versions.reads(m) for versions in self._versions for m in numbers)

    def _wanted_snapshots(self, base: int, program: Program, settings: RunSettings) -> frozenset[int]:
        """The minibatches after whose updates weights are kept."""
        every = settings.snapshot_every
        if not every:
            return frozenset()
        updates = {each.microbatch // self._microbatches for each in program.all_actions() if each.op == "U"}
        return frozenset(i for i in updates if (settings.steps + base + i + 1) % every == 0)

    def _collect(self, each: Slice, values: Sequence[Any], settings: RunSettings) -> None:
        """Join the weights that stages have kept after the same update."""
        for (minibatch, stage), mine in zip(each.function.kept, values, strict=True):
            version = each.base + minibatch + 1
            parts = self._parts_of_snapshots.setdefault(version, {})
            parts[stage] = mine
            if len(parts) == len(self._stages):
                del self._parts_of_snapshots[version]
                kept = Snapshot(settings.steps + version, [parts[k] for k in range(len(parts))])
                self._kept.append((version, kept))

    def restore(self, snapshot: Snapshot) -> None:
        """Write a snapshot into the model's own variables."""
        self._store(snapshot.stages)

    # Between the model and the devices

    def _retraced(self) -> None:
        super()._retraced()
        self._specs.clear()


def _with_slice(
    slices: list[tuple[int, int | None]], results: int, needs: int, posted: int
) -> list[tuple[int, int | None]]:
    """The slices with one more, up to so many results, which asks for so many minibatches of those that have come."""
    if needs > posted:
        return [*slices, (results, posted)]
    last = slices[:-1] if slices and slices[-1][1] is None else slices
    return [*last, (results, None)]


def _nothing(horizon: float) -> None:
    """Weights that nobody asks for."""
