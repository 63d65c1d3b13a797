"""Keras callbacks for pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


class Snapshots(keras.callbacks.Callback):
    """Calls a function with the weights after every so many updates, without draining the pipeline.

    Each stage keeps its weights right after the update in question, so what the function sees is the model after
    exactly that many updates, whatever is in flight. While the function runs the stages rest.

    Args:
        every_steps: call after every so many updates, counted from the start of ``fit``.
        function: ``function(step, model)`` with the wrapped model, whose weights are those of that step. What would
            drain the pipeline (evaluating the ``PipelineModel`` itself, for one) raises RuntimeError in it.
    """

    def __init__(self, every_steps: int, function: Callable[[int, keras.Model], None]) -> None:
        super().__init__()
        if every_steps < 1:
            raise ValueError(f"Snapshots come every so many steps. Received: every_steps={every_steps}. Try 20.")
        self._every_steps, self._function = every_steps, function

    def on_train_begin(self, logs: Any = None) -> None:
        """Ask for the snapshots."""
        if self.model.snapshot_every:
            raise ValueError(
                "Only one Snapshots callback can be served. Received: callbacks with two. Try one with both functions."
            )
        self.model.snapshot_every = self._every_steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Hand over those that are complete."""
        for step in self.model.snapshots():
            self._function(step, self.model.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Hand over those that the drain has completed."""
        self.on_train_batch_end(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        """No more."""
        self.model.snapshot_every = 0
