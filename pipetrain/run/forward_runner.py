"""Runs minibatches forward through all stages, each by one call of a function over all devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, cast

import tensorflow as tf

from pipetrain.compute.cores import is_processor
from pipetrain.compute.functions.inference import Inference
from pipetrain.compute.program.arguments import ProgramResult, Settings
from pipetrain.compute.program.function import ProgramFunction, ProgramInputs
from pipetrain.run.collector import Result
from pipetrain.run.control import Caller, RunSettings
from pipetrain.run.program_runner import ProgramRunner
from pipetrain.schemes.table import INFERENCE


class Begun(NamedTuple):
    """A minibatch whose call has begun."""

    made: Future[ProgramResult]
    caller: Caller
    function: ProgramFunction
    given: ProgramInputs


class ForwardRunner(ProgramRunner):
    """Minibatches go forward, as many calls at once as there are devices: each is then at another stage.

    Where a minibatch leaves state to the next one, calls are made one after another.

    Args:
        stages: the replicas of every stage in order.
        functions: those that have been traced for these stages, to which others are added.
    """

    def __init__(self, stages: Sequence[Sequence[Inference]], functions: dict[Any, Any]) -> None:
        super().__init__(cast(Any, stages), INFERENCE, 1, lambda: RunSettings(is_traced=False))
        self._inferences = [replica for replicas in stages for replica in replicas]
        self._functions = functions
        self._calls = deque[Begun]()
        self._taken = 0  # results
        self._callers = deque[Caller]()  # whose turn is next comes first

    @property
    def window(self) -> int:  # type: ignore[override]
        """How many minibatches may be posted ahead of the results taken."""
        return len(self._inferences) + 1

    def post(self, x: list[tf.Tensor], y: Any, sample_weight: Any, learning_rate: float | None) -> None:
        """Send a minibatch on its way; labels stay behind."""
        settings = self._run or self._start()
        given = ProgramInputs([x], [None], {0: int(x[0].shape[0])})
        function = self._known(given, settings)
        if not self._callers:
            at_once = 1 if any(each.assigns for each in self._inferences) else len(self._inferences)
            self._callers.extend(Caller(self._lost) for _ in range(at_once))
            for each in self._callers:
                each.start()
        caller = self._callers[0]
        self._callers.rotate(-1)
        self._calls.append(Begun(caller.submit(function, given), caller, function, given))

    def _known(self, given: ProgramInputs, settings: RunSettings) -> ProgramFunction:
        """The function for such a minibatch; one that is to be traced, and tried for XLA, may wait for workers."""
        if not self._has_compiled:
            return self._function_for(given, settings)[0]
        return self._lost.unless_lost(lambda: self._function_for(given, settings))[0]

    @property
    def _next(self) -> int:
        return self._taken + len(self._calls)

    def result(self) -> Result:
        """The next minibatch's penalty and predictions, in order; waits for them. Raises what a stage raised."""
        self._check(self._calls[0], self._taken)
        ((made,), *_) = self._calls.popleft().made.result()
        self._taken += 1
        return Result(made.loss, made.predictions)

    def _check(self, call: Begun, number: int) -> None:
        """Wait for the call of the minibatch with this number. Raises what it raised, with a note on the stage."""
        call.caller.wait(call.made)
        error = call.made.exception()
        if error is None:
            return
        if not isinstance(error, tf.errors.OpError):
            raise error
        settings = RunSettings()
        trial = self._settings_of(call.given.rows, settings)
        of_call = call.function, call.given, self._program(settings), trial, number
        raise self._explained(error, *of_call) from None

    def _settings_of(self, rows: Any, settings: RunSettings) -> Settings:
        return super()._settings_of(rows, settings)._replace(is_timed=False)

    def _retraced(self) -> None:
        """The stages' functions are those for which ``functions`` were traced."""

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """A forward changes nothing but state, which is not kept."""
        yield

    def _count_forwards(self) -> None:
        """No call is more than a forward."""

    # Between the model and the devices

    def _load(self, settings: RunSettings) -> None:
        for stage in self._stages:
            for number, replica in enumerate(stage):
                cast(Any, replica).load_state(number)
        if any([each.hold_state() for each in self._inferences]):  # each of them, whatever the first one says
            self._functions.clear()
        self._await_writes()

    def _outcome(self) -> list[Any]:
        for each in self._inferences:
            each.read_assigned()
        return [stage.outcome(others) for stage, *others in self._stages]

    def _over(self) -> None:
        super()._over()
        with suppress(Exception):  # there is nothing to empty on a worker that is lost
            self._lost.unless_lost(self._empty)

    def _empty(self) -> None:
        for each in self._inferences:
            each.empty()

    def _count(self, settings: RunSettings) -> None:
        """Nothing is updated."""

    def _rest(self) -> None:
        """Let all calls end; their results wait to be taken."""
        for each in self._calls:
            each.caller.wait(each.made)
        for n, each in enumerate(self._calls):
            self._check(each, self._taken + n)
        self._end_calls()

    def _stop(self) -> None:
        self._end_calls()
        self._calls.clear()

    def _end_calls(self) -> None:
        for each in self._callers:
            each.close()
        for each in self._callers:
            each.end()
        self._callers.clear()


def is_one_call(stages: Sequence[Sequence[Inference]]) -> bool:
    """Whether minibatches are to be calls, when the stages have been traced.

    The devices are processors, of this process or of workers, and no layer calls Python, see ``is_one_function``.
    """
    every = [replica for replicas in stages for replica in replicas]
    return all(is_processor(each.device) and not each.calls_python for each in every)
