"""What a run knows of a lost worker, and how long it still waits for calls to it."""

from __future__ import annotations

import time

LOST_S = 10.0  # after a worker is lost, calls to it have so long to fail


class LostWorker:
    """Whether a worker is lost, of which another thread tells, repeatedly from then on.

    TensorFlow fails the calls that were under way when the worker ended, and lets one that is made afterwards wait
    until the worker is there again. The thread that made it is waited for no longer than ``LOST_S``.

    ``error`` says which worker is lost, None if none is.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._since_s = 0.0

    def told(self, error: Exception) -> bool:
        """A worker is lost; whether that was not known."""
        is_new = self.error is None
        if is_new:
            self.error, self._since_s = error, time.monotonic()
        return is_new

    def gives_up(self) -> bool:
        """Whether threads that have not ended are left to themselves: they wait for the lost worker."""
        return self.error is not None and time.monotonic() > self._since_s + LOST_S
