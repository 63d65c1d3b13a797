"""The callbacks that ``fit`` adds to the user's: the one that tells its session what happens, and the progress bar."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import keras

from pipetrain.frontend.fit_session import FitSession
from pipetrain.frontend.runner_fit import NAMES

BAR, TIMES = 20, len(" 99999s 999ms/step")  # characters of Keras' bar, and of its times at most


class ProgressBar(keras.callbacks.ProgbarLogger):
    """At an epoch's end it shows those of a pipeline's figures that fit into the terminal's line; the logs have all.

    A line that is longer than the terminal's cannot be overwritten. Where the output is no terminal, all fit.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The bar's last line."""
        logs = dict(logs or {})
        figures = {name: logs.pop(name) for name in NAMES if name in logs}
        room = _columns() - _width(self.target or self.seen, logs)
        for name, value in figures.items():
            room -= len(_text(name, value))
            if room >= 0:
                logs[name] = value
        super().on_epoch_end(epoch, logs)


def _columns() -> float:
    """Characters of a line; one less than the terminal's, in which a full line would end with an empty one."""
    if not sys.stdout.isatty():
        return math.inf
    return (os.get_terminal_size(sys.stdout.fileno()).columns or math.inf) - 1  # 0 if it does not tell


def _width(steps: int, logs: dict[str, float]) -> int:
    """Characters of the bar's last line, at most."""
    return len(f"{steps}/{steps} ") + BAR + TIMES + sum(len(_text(*each)) for each in logs.items())


def _text(name: str, value: float) -> str:
    """As Keras shows it."""
    return f" - {name}: {value:.4f}" if abs(value) > 1e-3 else f" - {name}: {value:.4e}"


class FitCallback(keras.callbacks.Callback):
    """Tells the session where an epoch's data begin and how many steps it has; stops at a loss that is not finite.

    ``keras.callbacks.TerminateOnNaN`` among the user's callbacks is left to do the latter.

    Args:
        session: of this ``fit``.
    """

    def __init__(self, session: FitSession) -> None:
        super().__init__()
        self._session, self._step = session, 0
        self._stop_at_nan = not any(isinstance(each, keras.callbacks.TerminateOnNaN) for each in session.callbacks)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """The next steps read from a new iterator."""
        self._session.begin_epoch(self.params.get("steps"))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Check the loss."""
        self._step += 1
        self._session.stopped = self.model.stop_training  # Keras asks for it now, and leaves the epoch
        if self._stop_at_nan and not math.isfinite(logs["loss"]):
            raise FloatingPointError(
                f"The loss is {logs['loss']} at step {self._step}. Received: scheme={self.model.scheme!r}. "
                "Try a smaller learning rate, or clipnorm; the model keeps the weights of its last drain or snapshot."
            )

    def on_train_end(self, logs: Any = None) -> None:
        """All callbacks have seen it."""
        if self._session.at_end is not None:
            self._session.at_end()


def as_list(callbacks: Any) -> list[Any]:
    """The callbacks that ``fit`` is given, in any of the ways that Keras takes."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [each for each in keras.tree.flatten(callbacks) if each is not None]


def with_last(callbacks: Any, added: Sequence[keras.callbacks.Callback], shows_progress: bool) -> Any:
    """The same, with some more at the end, and a bar that ``shows_progress`` if there is none."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        for each in added:
            each.set_params(callbacks.params)
            each.set_model(callbacks.model)
        kinds = tuple(map(type, added))  # of an earlier ``fit``
        callbacks.callbacks[:] = [*(each for each in callbacks.callbacks if not isinstance(each, kinds)), *added]
        return callbacks
    users = as_list(callbacks)
    has_bar = any(isinstance(each, keras.callbacks.ProgbarLogger) for each in users)
    return [*users, *added, *([ProgressBar()] if shows_progress and not has_bar else [])]
