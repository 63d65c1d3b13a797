"""The time that training takes, without what happens in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TrainingTime:
    """A stopwatch that stands still while the stages rest for something else: an evaluation, a look at a snapshot.

    Args:
        now_s: a clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s, self._start_s = now_s, now_s()
        self._paused = 0
        self._paused_s = self._paused_at_s = 0.0

    @property
    def seconds(self) -> float:
        """Since it was made, but for the pauses."""
        now_s = self._paused_at_s if self._paused else self._now_s()
        return now_s - self._start_s - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile it stands still; pauses within a pause change nothing."""
        if not self._paused:
            self._paused_at_s = self._now_s()
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            if not self._paused:
                self._paused_s += self._now_s() - self._paused_at_s
