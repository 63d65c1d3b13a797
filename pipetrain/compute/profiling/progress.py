"""Keras' progress bar, shown only for work that takes long."""

from __future__ import annotations

import time

import keras

PATIENCE_S = 1.0  # the bar appears after this long


class Progress:
    """A progress bar below a line that describes the work.

    Args:
        what: the line.
        steps: how many there are; no bar for none.
    """

    def __init__(self, what: str, steps: int) -> None:
        self._what, self._steps, self._start_s = what, steps, time.perf_counter()
        self._bar: keras.utils.Progbar | None = None
        self._done = 0

    def add(self, steps: int) -> None:
        """Show that this many more steps are done."""
        self._done += steps
        if not self._steps or (self._bar is None and time.perf_counter() - self._start_s < PATIENCE_S):
            return
        if self._bar is None:
            print(self._what)
            self._bar = keras.utils.Progbar(self._steps, unit_name="step")
        self._bar.update(self._done)

    def end(self) -> None:
        """No more steps come, even if not all are done: a bar that is shown ends, and with it its line."""
        if self._bar is not None and self._done < self._steps:
            self._bar.update(self._steps)
