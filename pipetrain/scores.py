"""Losses and metrics of the minibatches that a pipeline gives back, as Keras keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.bound import any_rows, direct
from pipetrain.compute.segment import set_mask
from pipetrain.compute.stage import Values
from pipetrain.run.collector import Result
from pipetrain.run.readahead import Minibatch

Score = Callable[[Minibatch, Result], Any]  # updates the metrics and gives Keras' logs


class Scores:
    """Updates a compiled model's trackers with results; one TensorFlow op a minibatch, traced at the first.

    Args:
        model: the compiled model.
        outputs: symbolic tensors like the results' predictions.
        pack: gives predictions the structure that calling the model gives.
        built: called when the metrics have their variables.
    """

    def __init__(
        self,
        model: keras.Model,
        outputs: list[Any],
        pack: Callable[[list[tf.Tensor]], Any],
        built: Callable[[], None],
    ) -> None:
        self._model, self._outputs, self._pack, self._built = model, outputs, pack, built
        self._train = tf.function(self._update_train, autograph=False)
        self._test = tf.function(self._update_test, autograph=False)

    def of_training(self, targets: Any) -> Score:
        """For labels and sample weights of these specs, where a result's loss is the minibatch's."""
        return self._score(self._train, targets)

    def of_testing(self, targets: Any) -> Score:
        """Likewise, where a result's loss is the regularization penalty alone."""
        return self._score(self._test, targets)

    def loss(self, y: Any, outputs: list[tf.Tensor], sample_weight: Any) -> tf.Tensor:
        """The compiled loss."""
        return self._model._compile_loss(y, self._pack(outputs), sample_weight)

    def _score(self, function: Any, targets: Any) -> Score:
        update: Any = None

        def score(minibatch: Minibatch, result: Result) -> Any:
            nonlocal update
            x, *given = minibatch
            rows = tf.constant(int(x[0].shape[0]))
            if update is None:
                predictions = any_rows(Values(self._outputs, result.predictions.masks))
                loss = tf.TensorSpec([], result.loss.dtype)
                concrete = function.get_concrete_function(targets, predictions, loss, tf.TensorSpec([], rows.dtype))
                update = direct(concrete)
                self._built()
            return update(given, result.predictions, result.loss, rows)

        return score

    def _update_train(self, targets: Any, predictions: Values, loss: tf.Tensor, rows: tf.Tensor) -> Any:
        self._set_masks(predictions)
        if self._model._compile_loss.metrics:  # each output's own loss, beside their sum
            y, sample_weight = targets
            self.loss(y, predictions.tensors, sample_weight)
        return self._update(targets, predictions, loss, rows)

    def _update_test(self, targets: Any, predictions: Values, penalty: tf.Tensor, rows: tf.Tensor) -> Any:
        self._set_masks(predictions)
        loss = penalty
        if self._model._compile_loss is not None:
            y, sample_weight = targets
            loss = self.loss(y, predictions.tensors, sample_weight)
            loss += tf.cast(penalty, loss.dtype)
        return self._update(targets, predictions, loss, rows)

    def _update(self, targets: Any, predictions: Values, loss: tf.Tensor, rows: tf.Tensor) -> Any:
        """What Keras' own steps do after the forward: the tracker of the loss weighs it by rows."""
        y, sample_weight = targets
        self._model._loss_tracker.update_state(loss, sample_weight=tf.cast(rows, "float32"))
        return self._model.compute_metrics(None, y, self._pack(predictions.tensors), sample_weight=sample_weight)

    def _set_masks(self, predictions: Values) -> None:
        for tensor, mask in zip(*predictions, strict=True):
            set_mask(tensor, mask)
