"""Runs a pipeline whose minibatches are one function each, behind the interface of a ``Pipeline``."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from pipetrain.compute.cores import HOST, LOCAL_HOST, is_processor, is_remote
from pipetrain.compute.functions.inference import trace_stages
from pipetrain.compute.functions.kernels import gc_paused
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import KeptStage
from pipetrain.compute.optimizer.gradient_scaling import LossScale
from pipetrain.compute.program.arguments import ProgramResult, Settings
from pipetrain.compute.program.clock import ProgramTimes, ahead_s
from pipetrain.compute.program.function import ProgramFunction, ProgramInputs, traced, walked
from pipetrain.compute.program.stage_trace import StagePlace
from pipetrain.compute.program.walk import Failed
from pipetrain.compute.tensorflow_private import is_deterministic
from pipetrain.run import pipeline
from pipetrain.run.collector import Kept, Result
from pipetrain.run.control import RunSettings, add_note
from pipetrain.run.pipeline import Activity
from pipetrain.run.stepwise import Stepwise
from pipetrain.schemes.actions import Action, Op
from pipetrain.schemes.policies import FlushPolicy
from pipetrain.schemes.programs import Program, of_minibatch
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.splitting import Parts
from pipetrain.trace.trace import Trace

CLOCKS_HOLD_S = 60.0  # so long clocks are not read again
ACTION = re.compile(r"action_\d+_\d+")  # as TensorFlow names in its errors what has failed


class ProgramRunner(Stepwise):
    """A pipeline that drains after every minibatch, which is one call of a function over all devices.

    Args:
        stages: the replicas of every stage in order.
        scheme: order of actions and choice of weights.
        microbatches: how many a minibatch is split into.
        settings: called whenever the weights are taken from the model.
    """

    keeps_flight = True

    def __init__(
        self,
        stages: Sequence[Sequence[Stage]],
        scheme: Scheme,
        microbatches: int,
        settings: Callable[[], RunSettings] = RunSettings,
    ) -> None:
        self._stages, self._scheme, self._microbatches = [list(replicas) for replicas in stages], scheme, microbatches
        self._every = [replica for stage in stages for replica in stage]
        # Of the newest steps, until somebody reads the trace.
        self._timed = deque[tuple[ProgramTimes, int, Mapping[int, int], Any, Any]]()
        super().__init__([each.device for each in self._every], settings, lambda: None)
        self._replicas = tuple(map(len, self._stages))
        self._chunks = scheme.schedule.chunks
        self._functions: dict[Any, tuple[ProgramFunction, ProgramTimes]] = {}
        self._scale = LossScale()
        self._ran: dict[StagePlace, int] = {}  # forwards that calls of forward and backward have done so far
        self._forms: dict[int, Any] = {}  # of minibatches, by their rows
        self._busy_s = 0.0
        is_alone = not any(is_remote(each.device) for each in self._every)
        self._host = HOST if is_alone else LOCAL_HOST  # workers' devices have the short name, too
        self._ahead_s: dict[str, float] = {}  # by how much clocks of other processes are ahead
        self._clocks_read_s = float("-inf")

    def activity(self) -> Activity:
        """The devices' activity since the runner was made."""
        ranks = len(self._every) // self._chunks
        return Activity(self._busy_s, ranks, self.made + self._steps_done > 0)

    @property
    def trace(self) -> Trace:
        """What happened so far."""
        while self._timed:
            times, minibatch, rows, at_s, sizes = self._timed.popleft()
            self._spans.extend(times.spans(minibatch, at_s))
            self._transfers.extend(times.transfers(minibatch, rows, at_s, sizes))
        ranks = None if self._chunks == 1 else self._scheme.schedule.devices(len(self._stages))
        starts = [first * self._microbatches for first in self._starts]
        spans, sent = self._spans.columns(), self._transfers.columns()
        since_s = spans.start_s[0] if len(spans) else 0.0
        return Trace.of(spans, sent[sent.start_s >= since_s], ranks, starts)

    def _record(self, count: int) -> None:
        super()._record(count)
        self._timed.clear()

    def _gradients_traced(self, targets: Any) -> Sequence[Any]:
        return trace_stages(self._stages, targets)

    def _retraced(self) -> None:
        self._functions.clear()

    def post(self, x: list[tf.Tensor], y: Any, sample_weight: Any, learning_rate: float | None) -> None:
        """Make the minibatch's step."""
        settings = self._run or self._start()
        self._lost.unless_lost(lambda: self._make(x, (y, sample_weight), settings, learning_rate))

    def _make(self, x: list[tf.Tensor], targets: Any, settings: RunSettings, rate: float | None) -> None:
        rows = int(x[0].shape[0])
        number = self._number_of(self._next, settings)
        given = ProgramInputs([x], [targets], {0: rows}, self._scale.scale, number=number)
        if any([each.set_rate(rate) for each in self._every]):  # each of them, whatever the first one says
            self._await_writes()
        function, times = self._function_for(given, settings)
        try:
            result = function(given)
        except tf.errors.OpError as error:
            trial = self._settings_of(given.rows, settings)
            raise self._explained(error, function, given, self._program(settings), trial, self._next) from None
        if result.finite is not None:
            self._scale = self._scale.after(bool(result.finite))
        self._note(times, result, self.made + self._steps_done, given.rows, settings.is_traced)
        self._count_runs(function)
        for each in self._every:
            each.updated()
        (made,) = result.minibatches
        self._stepped(Result(made.loss, made.predictions))

    @property
    def scale(self) -> LossScale:
        """That of the next minibatch's loss."""
        return self._scale

    def kept(self) -> Kept:
        """What the devices hold after the minibatches so far, while the weights are on them; training goes on."""
        return Kept(self._lost.unless_lost(self._kept_stages))

    def _kept_stages(self) -> list[list[KeptStage]]:
        kept = [[replica.kept() for replica in stage] for stage in self._stages]
        self._await_writes()  # a function over several processes would not wait for what is read either
        return kept

    @property
    def _next(self) -> int:
        """The number of the minibatch that is posted next, since the weights were taken from the model."""
        return self._steps_done

    def _number_of(self, minibatch: int, settings: RunSettings) -> tf.Tensor | None:
        """That of a minibatch since training began, where random numbers of what is sent depend on it."""
        if not self._scheme.compresses:
            return None
        with tf.device(HOST):
            return tf.constant(settings.minibatches + minibatch, tf.int64)

    def _form_of(self, rows: int) -> Any:
        """What minibatches of so many rows have in common with others that the same function serves."""
        if rows not in self._forms:
            self._forms[rows] = Parts(rows, self._microbatches).form(self._replicas)
        return self._forms[rows]

    def _count_runs(self, function: ProgramFunction) -> None:
        for place, count in function.runs.items():
            self._ran[place] = self._ran.get(place, 0) + count

    def _function_for(self, given: ProgramInputs, settings: RunSettings) -> tuple[ProgramFunction, ProgramTimes]:
        """The function for such a minibatch, which is traced for the first of the same form."""
        scale = None if self._scale.is_dynamic else self._scale.scale
        key = self._form_of(given.rows[0]), settings.loss_is_mean, scale, settings.exact_times
        if key not in self._functions:
            function = self._traced(given, settings)
            self._functions[key] = function, ProgramTimes(function.clock, self._microbatches, self._replicas)
        return self._functions[key]

    def _traced(self, given: ProgramInputs, settings: RunSettings) -> ProgramFunction:
        of_call, step, program = self._settings_of(given.rows, settings), self._next, self._program(settings)
        self._rehearse(given, program, of_call, step)
        with gc_paused():
            of_program = self._stages, self._scheme, program
            return traced(*of_program, self.traced_for, of_call, self._failed_in(step))

    def _rehearse(
        self, given: ProgramInputs, program: Program, of_call: Settings, base: int, held_specs: Any = None
    ) -> None:
        """Let XLA compile the stages, or find that it cannot, before a function has them: there it could not give way.

        Nothing remains of the actions, which are made one by one.
        """
        if self._has_compiled:
            trial = of_call._replace(is_timed=False, keeps_state=False)
            with self._as_before():
                walked(self._stages, self._scheme, program, given, trial, self._failed_in(base), held_specs)
            self._count_forwards()

    @property
    def _has_compiled(self) -> bool:
        return any(each.is_compiled for each in self._every)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """In the end weights and optimizers have the values that they had, whatever was done."""
        with ExitStack() as kept:
            kept.callback(self._await_writes)
            for each in self._every:
                kept.enter_context(each.as_before())
            yield

    def _count_forwards(self) -> None:
        """Learn how many forwards calls of the last stage have done that are a forward and a backward."""
        last, count = self._stages[-1], len(self._stages)
        places = [StagePlace(count - 1, count, r, len(last)) for r in range(len(last))]
        self._ran = {place: each.forwards_run() for place, each in zip(places, last, strict=True)}

    def _settings_of(self, rows: Mapping[int, int], settings: RunSettings) -> Settings:
        """Of a function that works on minibatches of so many rows."""
        scale = None if self._scale.is_dynamic else self._scale.scale
        parts = {number: Parts(each, self._microbatches) for number, each in rows.items()}
        return Settings(parts, settings.loss_is_mean, scale, self._host, is_timed=True)

    def _failed_in(self, base: int) -> Failed:
        """Told of an action that could not be traced; the program's minibatch 0 has this number."""

        def failed(error: Exception, place: StagePlace, actions: Sequence[Action]) -> None:
            add_note(error, self._told(place, actions[-1], base))

        return failed

    def _program(self, settings: RunSettings) -> Program:
        depends = self._scale.is_dynamic or bool(self._every[0].global_clipnorm)
        shares = self._chunks > 1 and any(each.shared for each in self._every)
        # A forward that changes weights is followed by a backward that reads them changed.
        apart = settings.exact_times or any(each.changed for each in self._stages[-1])
        return of_minibatch(self._scheme.schedule, len(self._stages), self._microbatches, depends or shares, apart)

    def _explained(
        self,
        error: tf.errors.OpError,
        function: ProgramFunction,
        given: ProgramInputs,
        program: Program,
        trial: Settings,
        base: int,
        held_specs: Any = None,
    ) -> tf.errors.OpError:
        """The error of a call with a note on what has failed, or the one that is behind it."""
        if self._name(error, function, base) and not isinstance(error, tf.errors.CancelledError):
            return error
        if self._lost.error is not None or isinstance(error, tf.errors.UnavailableError):
            return error  # no other cause, and actions are not made again on a worker that is lost
        return self._lost.unless_lost(lambda: self._cause(error, given, program, trial, base, held_specs))

    def _cause(
        self,
        error: tf.errors.OpError,
        given: ProgramInputs,
        program: Program,
        trial: Settings,
        base: int,
        held_specs: Any = None,
    ) -> tf.errors.OpError:
        """What has failed, where TensorFlow tells only what was stopped because of it, or not where it was.

        It shows when the program's actions are made again one by one, of which nothing remains.
        """
        trial = trial._replace(is_timed=False, updates=False, keeps_state=False)
        try:
            with self._as_before():
                walked(self._stages, self._scheme, program.apart(), given, trial, self._failed_in(base), held_specs)
        except Exception as cause:
            return cause if isinstance(cause, tf.errors.OpError) else error
        return error

    def _name(self, error: tf.errors.OpError, function: ProgramFunction, base: int) -> bool:
        """Add to an error which action of which stage has failed, if that is known; whether it is.

        The program's minibatch 0 has the number ``base``.
        """
        found = ACTION.findall(error.message or str(error))
        name = next((each for each in reversed(found) if each in function.calls), None)
        if name is None:
            return False
        place, actions, number = function.calls[name]
        if number is not None:
            actions = (self._half(actions[0], place, number),)
        if not isinstance(error, tf.errors.CancelledError):
            add_note(error, self._told(place, actions[-1], base))
        return True

    def _told(self, place: StagePlace, action: Action, base: int) -> str:
        """Which action has failed, for people; the program's minibatch 0 has this number."""
        action = action.later(base * self._microbatches)
        minibatch, number = divmod(action.microbatch, self._microbatches)
        which = f"minibatch {minibatch}" + (f", microbatch {number}" if self._microbatches > 1 else "")
        return f"Raised in {place}, {action.operation.about} of {which} (action {action})."

    def _half(self, action: Action, place: StagePlace, number: int) -> Action:
        """Which half of a forward and backward has failed, that was this one of its stage's in the step."""
        before = self._ran.get(place, 0)
        self._ran[place] = now = self._stages[place.stage][place.replica].forwards_run()
        backward: Op = "B" if action.op == "FB" else "I"
        return action._replace(op=backward if now - before > number else "F")

    def _note(
        self, times: ProgramTimes, result: ProgramResult, minibatch: int, rows: Mapping[int, int], keeps: bool
    ) -> None:
        """Note when the actions of a call that is just over began and ended; its minibatch 0 has this number."""
        assert result.times is not None
        at_s = result.times.numpy() + (time.perf_counter() - time.time())
        for device, ahead in self._ahead_s.items():
            at_s[times.places.get(device, [])] -= ahead
        self._busy_s += times.busy_s(at_s)
        if keeps:
            sizes = None if result.sizes is None else result.sizes.numpy()
            self._timed.append((times, minibatch, rows, at_s, sizes))
            if len(self._timed) * len(times) > pipeline.KEPT_SPANS:
                self._timed.popleft()

    # Between the model and the devices

    def _load(self, settings: RunSettings) -> None:
        for stage in self._stages:
            for number, replica in enumerate(stage):
                replica.load(settings.updates, number)
        if any([each.hold_state() for each in self._every]):  # each of them, whatever the first one says
            self._functions.clear()
        if settings.kept is not None:
            for stage, kept in zip(self._stages, settings.kept.stages, strict=True):
                for replica, mine in zip(stage, kept, strict=True):
                    replica.keep(mine)
        self._await_writes()
        self._scale = settings.loss_scale
        self._read_clocks()
        self._count_forwards()

    def _read_clocks(self) -> None:
        """Learn how far others' clocks are ahead; they drift apart by little, and reading them takes a while."""
        if time.monotonic() - self._clocks_read_s > CLOCKS_HOLD_S:
            remote = {each.device for each in self._every if is_remote(each.device)}
            self._ahead_s = {device: ahead for device in remote if (ahead := ahead_s(device))}
            self._clocks_read_s = time.monotonic()

    def _count(self, settings: RunSettings) -> None:
        counts = [count - settings.updates for each in self._every for count in each.counts()]
        if not self._scale.is_dynamic:
            self._steps_done = min(counts, default=self._steps_done)
        elif min(counts, default=0) > self._scale.stepped:  # of steps that were skipped nothing tells
            self._scale, self._steps_done = self._scale.after(True), self._steps_done + 1

    def _over(self) -> None:
        super()._over()
        self.loss_scale = self._scale

    def _outcome(self) -> list[Any]:
        for each in self._every:
            each.read_state()
        return [stage.outcome(others) for stage, *others in self._stages]

    def _store(self, values: Sequence[Any]) -> None:
        for (stage, *_), mine in zip(self._stages, values, strict=True):
            stage.store(mine)


def is_one_function(scheme: Scheme, stages: Sequence[Sequence[Stage]]) -> bool:
    """Whether minibatches are to be calls of functions over all devices, when the stages have been traced.

    All devices are processors, of this process or of workers. No layer may call Python: of an error there, which need
    not come a second time, TensorFlow may tell only that other devices have stopped because of it.
    """
    known = scheme.schedule.chunks == 1 if scheme.asynchronous else isinstance(scheme.policy, FlushPolicy)
    alone = known and not scheme.fits and not is_deterministic()
    every = [replica for replicas in stages for replica in replicas]
    return alone and all(is_processor(each.device) and not each.calls_python for each in every)
