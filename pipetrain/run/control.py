"""What the threads of a pipeline share: settings, reports, pauses; and that they end in time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from pipetrain.compute.cores import finish, is_remote
from pipetrain.compute.keras_private import with_state_of_keras
from pipetrain.compute.optimizer.gradient_scaling import LossScale
from pipetrain.run.collector import Kept, OutputReport, UpdateReport
from pipetrain.run.gradient_exchange import Closed, Mailbox

ASK_S = 0.2  # between two questions whether to wait on
STARTS_S = 5.0  # a thread that has not begun this long after its start never will


class StoppableThread(threading.Thread):
    """A thread of a run, which ends when what it waits for is closed."""

    def ended(self, gives_up: Callable[[], bool]) -> None:
        """Wait until the thread has ended, if it was started: an interrupt may have come before that.

        It is left to itself as soon as somebody ``gives_up``.
        """
        until_s = time.monotonic() + STARTS_S
        while self.ident is None and self in threading.enumerate() and time.monotonic() < until_s:
            time.sleep(1e-3)
        while self.ident is not None and self.is_alive() and not gives_up():
            self.join(ASK_S)


Value = TypeVar("Value")

LOST_S = 10.0  # after a worker is lost, calls to it have so long to fail


class LostWorker:
    """Whether a worker is lost, of which another thread tells, repeatedly from then on.

    TensorFlow fails the calls that were under way when the worker ended, and lets one that is made afterwards wait
    until the worker is there again. The thread that made it is waited for no longer than ``LOST_S``.

    Args:
        devices: what may be lost: those in other processes.

    ``error`` says which worker is lost, None if none is.
    """

    def __init__(self, devices: Iterable[str] = ()) -> None:
        self._can_be = any(map(is_remote, devices))
        self.error: Exception | None = None
        self._since_s = 0.0

    def told(self, error: Exception) -> None:
        """A worker is lost."""
        if self.error is None:
            self._since_s = time.monotonic()
            self.error = error

    def check(self) -> None:
        """Raise the error if a worker is lost, before a call to it that would wait."""
        if self.error is not None:
            raise self.error

    def unless_lost(self, call: Callable[[], Value]) -> Value:
        """``call()``, which may wait for workers. Raises what that raises, or which worker is lost.

        If one can be lost the call is made by a thread of its own, which is left then. An interrupt lets it end.
        """
        self.check()
        if not self._can_be:
            return call()
        thread = CallThread(with_state_of_keras(call))
        try:
            thread.start()
            thread.ended(self.gives_up)
        except BaseException:  # an interrupt: what comes of it, and of further ones, is not to meet the call
            while True:
                with suppress(KeyboardInterrupt):
                    thread.ended(self.gives_up)
                    break
            raise
        if thread.is_alive():
            raise cast(Exception, self.error)
        return cast(Value, thread.outcome())

    def gives_up(self) -> bool:
        """Whether threads that have not ended are left to themselves: they wait for the lost worker."""
        return self.error is not None and time.monotonic() > self._since_s + LOST_S


class CallThread(StoppableThread):
    """A thread that makes one call, and does not keep the program from ending."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name="pipetrain call to workers", daemon=True)
        self._call = call
        self._value: Any = None
        self._raised: BaseException | None = None

    def run(self) -> None:
        """The thread's body."""
        try:
            self._value = self._call()
        except BaseException as error:
            self._raised = error

    def outcome(self) -> Any:
        """What the call gave, after its end. Raises what it raised."""
        if self._raised is not None:
            raise self._raised
        return self._value


class Caller(StoppableThread):
    """Makes calls one after another; it does not keep the program from ending.

    A call that waits for a lost worker need never return: then nobody waits for it either.

    Args:
        lost: says whether a worker is lost.
    """

    def __init__(self, lost: LostWorker) -> None:
        super().__init__(name="pipetrain calls", daemon=True)
        self._lost = lost
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Make this call after those before it."""
        made: Future[Any] = Future()
        self._calls.put((made, partial(call, *arguments)))
        return made

    def run(self) -> None:
        """The thread's body."""
        while (given := self._calls.get()) is not None:
            made, call = given
            if made.set_running_or_notify_cancel():
                try:
                    made.set_result(call())
                except BaseException as error:
                    made.set_exception(error)
            del given, made, call  # what they hold is not to stay while this waits for the next

    def wait(self, made: Future[Any]) -> None:
        """Wait until a call has ended. Raises which worker is lost, if the call does not return for that reason."""
        while wait([made], ASK_S).not_done:
            if self._lost.error is not None and self._lost.gives_up():
                raise self._lost.error

    def close(self) -> None:
        """No further call begins."""
        with suppress(Empty):
            while (given := self._calls.get_nowait()) is not None:
                given[0].cancel()
        self._calls.put(None)

    def end(self) -> None:
        """No further call begins; wait until the one that is made has ended."""
        self.close()
        self.ended(self._lost.gives_up)


class RunSettings(NamedTuple):
    """Settings that hold from one start of the threads to the next drain.

    ``updates``: the steps of the optimizer so far. ``steps``: the updates of this ``fit`` so far, from which snapshots
    count. ``snapshot_every``: the weights are kept whenever this number of updates has been made; 0 for never.
    ``loss_is_mean``: whether a minibatch's loss is the mean (else the sum) over its rows. ``exact_times``: whether
    threads wait for GPUs and workers, so that the trace has their times of completion. ``loss_scale``: that of the
    first minibatch. ``is_traced``: whether a trace is kept. ``kept``: what devices held in the run that goes on, None
    where it begins with an empty pipeline. ``minibatches``: those so far, of steps that were skipped, too.
    """

    updates: int = 0
    steps: int = 0
    snapshot_every: int = 0
    loss_is_mean: bool = True
    exact_times: bool = False
    loss_scale: LossScale = LossScale()
    is_traced: bool = True
    kept: Kept | None = None
    minibatches: int = 0


class Closable(Protocol):
    """What threads may wait at."""

    def close(self) -> None:
        """End all waiting."""


class Control:
    """Reports, pauses and the end of the threads of one run.

    It knows none of the stages: they are gone, with all tensors that they hold, as soon as nobody else has them.

    Args:
        settings: of this run.

    ``reports`` gives what the last stage and the updates came to. ``boxes`` are what threads may wait at.
    ``waits``: whether threads wait for GPUs, so that spans and transfers have the times of completion. ``error`` is the
    first exception of a thread, ``closed`` whether nothing is waited for any more.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.reports: Mailbox[OutputReport | UpdateReport] = Mailbox()
        self.report: Callable[[OutputReport | UpdateReport], None] = self.reports.put
        self.boxes: list[Closable] = [self.reports]
        self.waits, self._settings = settings.exact_times, settings
        self.error: BaseException | None = None
        self.closed = False
        self._failing = threading.Lock()
        self.running = threading.Event()
        self.running.set()

    def wants_snapshot(self, version: int) -> bool:
        """Whether this version of the weights is to be kept."""
        steps, every = self._settings.steps + version, self._settings.snapshot_every
        return every > 0 and steps % every == 0

    def wait_if_paused(self) -> None:
        """Wait while the pipeline is paused."""
        if not self.running.is_set():  # waiting would take the event's lock, which all share
            self.running.wait()

    def finish(self, device: str) -> None:
        """Wait until the device has finished its calls, if the trace is to have the times of completion."""
        if self.waits:
            finish(device)

    def fail(self, error: BaseException, place: str | None = None) -> None:
        """Called by a device's thread: keeps the first exception, with its place, and stops everyone."""
        with self._failing:  # several may fail at once
            if self.error is None:
                if place is not None:
                    add_note(error, place)
                self.error = error
        self.close()

    def lose(self, error: Exception) -> None:
        """Called when a worker is lost, and repeatedly from then on: stops everyone."""
        if not self.closed:
            self.fail(error)

    def close(self) -> None:
        """End whatever is waited for: threads end at their next action."""
        self.closed = True
        self.running.set()
        for box in self.boxes:
            box.close()

    def guarded(self, call: Callable[[], Value]) -> Value:
        """``call()``, or what a stage raised if the pipeline failed meanwhile."""
        try:
            return call()
        except Closed:
            if self.error is not None:
                raise self.error from None
            raise


def add_note(error: BaseException, note: str) -> None:
    """Add a line to what people see of an error."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:  # what add_note does, for tracebacks that know of notes
        error.__notes__ = [*getattr(error, "__notes__", []), note]
