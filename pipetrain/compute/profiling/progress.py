"""Keras' progress bar, shown only for work that takes long."""

from __future__ import annotations

import logging
import time

import keras

PATIENCE_S = 1.0  # the bar appears after this long

_logger = logging.getLogger(__name__)


class Progress:
    """A progress bar below a line that describes the work, if lines of the level INFO are shown.

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
        if self._bar is None and self._is_due():
            _logger.info(self._what)
            self._bar = keras.utils.Progbar(self._steps, unit_name="step")
        if self._bar is not None:
            self._bar.update(self._done)

    def end(self) -> None:
        """No more steps come, even if not all are done: a bar that is shown ends, and with it its line."""
        if self._bar is not None and self._done < self._steps:
            self._bar.update(self._steps)

    def _is_due(self) -> bool:
        waited = time.perf_counter() - self._start_s >= PATIENCE_S
        return bool(self._steps) and waited and _logger.isEnabledFor(logging.INFO)
