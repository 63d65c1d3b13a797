"""The callback between the user's and the progress bar, that ties Keras' loop to the session of its ``fit``."""

from __future__ import annotations

import math
from typing import Any

import keras

from pipetrain.frontend.fit_session import FitSession
from pipetrain.frontend.progress_bar import ProgressBar


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


def with_last(callbacks: Any, added: keras.callbacks.Callback, shows_progress: bool) -> Any:
    """The same, with one more at the end, and a bar that ``shows_progress`` if there is none."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        added.set_params(callbacks.params)
        added.set_model(callbacks.model)
        callbacks.callbacks[:] = [*(each for each in callbacks.callbacks if not isinstance(each, FitCallback)), added]
        return callbacks
    users = as_list(callbacks)
    has_bar = any(isinstance(each, keras.callbacks.ProgbarLogger) for each in users)
    return [*users, added, *([ProgressBar()] if shows_progress and not has_bar else [])]
