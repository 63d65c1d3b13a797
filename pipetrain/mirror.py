"""Data parallelism behind a PipelineModel: TensorFlow's MirroredStrategy over the same devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from pipetrain.layout import Layout
from pipetrain.plan.trace import Trace


class MirroredEngine:
    """A copy of the model mirrored on every device, trained by Keras itself.

    During ``fit`` the weights live in the copy; otherwise in the model.

    Args:
        model: the model to train.
        layout: its devices carry one replica each; its stages are not used.
    """

    def __init__(self, model: keras.Model, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self.strategy = tf.distribute.MirroredStrategy(layout.distinct_devices)
        with self.strategy.scope():
            self.trained = keras.models.clone_model(model)
        self._training = False
        self._snapshot_every = 0
        self.trace = Trace(())
        self.load()

    def load(self) -> None:
        """Outside training: the model's weights, mirrored."""
        if not self._training:
            self.trained.set_weights(self.model.get_weights())

    def prepare(self, rows: int, optimizer: Any, loss_is_mean: bool, loss: Any) -> None:
        """Mirror the model's weights; Keras does the rest."""
        self.load()

    def leftovers(self) -> tuple[()]:
        """None: a step of data parallelism is over when it returns."""
        return ()

    def begin_epoch(self, steps: int | None, snapshot_every: int) -> None:
        """From here on the weights live in the copy."""
        self._training, self._snapshot_every = True, snapshot_every

    def synchronize(self) -> None:
        """The mirrored weights flow back into the model."""
        if self._training:
            self.model.set_weights(self.trained.get_weights())

    def finish(self) -> None:
        """The end of training: from here on the weights live in the model."""
        self.synchronize()
        self._training = False

    def abort(self, store: bool) -> None:
        """The end of training by an exception; the weights flow back if ``store``."""
        if store:
            self.synchronize()
        self._training = False

    def snapshots(self, step: int) -> Iterator[int]:
        """``step`` if its weights are wanted; the model then holds them."""
        if self._snapshot_every and step % self._snapshot_every == 0:
            self.synchronize()
            yield step
