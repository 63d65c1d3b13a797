"""A thread that makes calls for another one, in the order in which it is given them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from pipetrain.run.lost_worker import LostWorker
from pipetrain.run.stoppable_thread import ASK_S, StoppableThread


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
