"""Writes checkpoints in a thread, while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipetrain.run.control import StoppableThread


class Writing(StoppableThread):
    """One checkpoint that is written.

    Args:
        step: of which it is.
        write: makes arrays of what there is, which may have to come from other processes, and writes them; gives
            whether that was to be done.

    ``is_written`` says so, ``error`` is the exception that came of it, ``took_s`` are the seconds that it took, and
    ``busy_s`` those of a processor.
    """

    def __init__(self, step: int, write: Callable[[], bool]) -> None:
        super().__init__(name="pipetrain checkpoint", daemon=True)
        self.step, self._write = step, write
        self.is_written = False
        self.error: Exception | None = None
        self.took_s = self.busy_s = 0.0

    def run(self) -> None:
        """The thread's body."""
        begun_s, busy_s = time.perf_counter(), time.thread_time()
        try:
            self.is_written = self._write()
        except Exception as error:
            self.error = error
        self.took_s, self.busy_s = time.perf_counter() - begun_s, time.thread_time() - busy_s

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.ident is not None and not self.is_alive()
