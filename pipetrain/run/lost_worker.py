"""What a run knows of a lost worker, and how long it still waits for calls to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar, cast

from pipetrain.compute.cores import is_remote
from pipetrain.compute.keras_private import with_state_of_keras
from pipetrain.run.stoppable_thread import StoppableThread

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
