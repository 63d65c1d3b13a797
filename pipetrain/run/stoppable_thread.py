"""A thread that may be waited for whether it has begun or not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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
