"""Losses and metrics of the minibatches that a pipeline gives back, as Keras keeps them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import keras
import tensorflow as tf

from pipetrain.compute.functions.kernels import direct
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.functions.undone import undone
from pipetrain.compute.functions.weight_binding import any_rows
from pipetrain.compute.graph.input_order import packed
from pipetrain.compute.keras_private import (
    built_when_traced,
    compiled_loss,
    count_of,
    has_metrics,
    overridden,
    set_mask,
    update_loss,
)
from pipetrain.frontend.divided_loss import Divided, DividedLoss, undivided
from pipetrain.run.collector import Result
from pipetrain.run.window import Minibatch


class StepMetrics(Protocol):
    """What becomes of a minibatch's result."""

    def __call__(self, minibatch: Minibatch, result: Result, counts: bool = False) -> Any:
        """Updates the metrics and gives Keras' logs; if it ``counts``, the optimizer has made one more update."""


def _nothing() -> None:
    """An evaluation's metrics are its own: nobody is told that they are built."""


class TrackedMetrics:
    """Updates a compiled model's trackers and its optimizer's count: one TensorFlow op a minibatch, traced at first.

    Args:
        model: the compiled PipelineModel.
        outputs: symbolic tensors like the results' predictions.
        pack: gives predictions the structure that calling the model gives.
        counted: counts the minibatches that the optimizer has been told of.
        built: called when the metrics have their variables, at the first minibatch that an epoch trains on.
    """

    def __init__(
        self,
        model: keras.Model,
        outputs: list[Any],
        pack: Callable[[list[tf.Tensor]], Any],
        counted: tf.Variable,
        built: Callable[[], None],
    ) -> None:
        self._model, self._outputs, self._built = model, outputs, built
        self._pack, self._counted = pack, counted
        self._has_own = bool(overridden(model.inner, ["compute_metrics"]))
        self._functions: dict[Any, Any] = {}
        self._divided: DividedLoss | None = None

    def divide(self, loss: Any) -> DividedLoss:
        """From now on the loss of a minibatch's part is told by what all of it is divided; ``loss`` as compiled."""
        self._divided = DividedLoss(compiled_loss(self._model), loss, self._pack(self._outputs))
        return self._divided

    @property
    def read_predictions(self) -> bool:
        """Whether those of training need a minibatch's predictions, beside its loss: else these may have no rows."""
        return self._has_own or has_metrics(self._model) or len(self._outputs) > 1

    def of_training(self, targets: Any) -> StepMetrics:
        """For labels and sample weights of these specs, where a result's loss is the minibatch's."""
        y, sample_weight = targets
        return self._step_metrics(self._update_train, (y, undivided(sample_weight)), self._built)

    def of_testing(self, targets: Any) -> StepMetrics:
        """Likewise, where a result's loss is the regularization penalty alone."""
        return self._step_metrics(self._update_test, targets)

    def loss(self, y: Any, outputs: list[tf.Tensor], sample_weight: Any) -> tf.Tensor:
        """The compiled loss; zero without one, where layers add losses of their own.

        Given ``Divided`` sample weights, that of a part of a minibatch.
        """
        if isinstance(sample_weight, Divided) and self._divided is not None:
            return self._divided(y, self._pack(outputs), sample_weight)
        if compiled_loss(self._model) is None:
            return tf.zeros([])
        return compiled_loss(self._model)(y, self._pack(outputs), sample_weight)

    def _step_metrics(
        self, body: Callable[..., Any], targets: Any, built: Callable[[], None] = _nothing
    ) -> StepMetrics:
        update: Any = None
        number = cache(tf.constant)  # which would take a moment of every minibatch

        def step_metrics(minibatch: Minibatch, result: Result, counts: bool = False) -> Any:
            nonlocal update
            rows, updates = number(int(minibatch.x[0].shape[0])), number(int(counts))
            if update is None:
                predictions = any_rows(BoundaryTensors(self._outputs, result.predictions.masks))
                others = any_rows([result.loss, rows, updates])
                given = any_rows(list(self._model.inputs)) if self._has_own else None
                update = direct(self._traced(body, (given, *targets), predictions, *others))
                built()
            inputs = minibatch.x if self._has_own else None
            targets_now = inputs, minibatch.y, undivided(minibatch.sample_weight)
            return update(targets_now, result.predictions, result.loss, rows, updates)

        return step_metrics

    def _traced(self, body: Callable[..., Any], *specs: Any) -> Any:
        """A function for these specs. If it is interrupted, so are the metrics that it builds: both begin anew."""
        function = self._functions.pop(body.__name__, None) or tf.function(body, autograph=False)
        with undone(built_when_traced(self._model)):
            concrete = function.get_concrete_function(*specs)
        self._functions[body.__name__] = function
        return concrete

    def _update_train(
        self, targets: Any, predictions: BoundaryTensors, loss: tf.Tensor, rows: tf.Tensor, updates: tf.Tensor
    ) -> Any:
        self._set_masks(predictions)
        if getattr(compiled_loss(self._model), "metrics", ()):  # each output's own loss, beside their sum
            _, y, sample_weight = targets
            self.loss(y, predictions.tensors, sample_weight)
        logs = self._update(targets, predictions, loss, rows)
        iterations = count_of(self._model.optimizer)
        with tf.control_dependencies(keras.tree.flatten(logs)):  # counted only if the metrics could be updated
            iterations.assign_add(tf.cast(updates, iterations.dtype))
            self._counted.assign_add(tf.cast(updates, self._counted.dtype))
        return logs

    def _update_test(
        self, targets: Any, predictions: BoundaryTensors, penalty: tf.Tensor, rows: tf.Tensor, updates: tf.Tensor
    ) -> Any:
        self._set_masks(predictions)
        _, y, sample_weight = targets
        loss = self.loss(y, predictions.tensors, sample_weight)
        loss += tf.cast(penalty, loss.dtype)
        return self._update(targets, predictions, loss, rows)

    def _update(self, targets: Any, predictions: BoundaryTensors, loss: tf.Tensor, rows: tf.Tensor) -> Any:
        """What Keras' own steps do after the forward: the tracker of the loss weighs it by rows."""
        x, y, sample_weight = targets
        update_loss(self._model, loss, tf.cast(rows, "float32"))
        if x is not None:
            x = packed(x, self._model.inner)
        return self._model.compute_metrics(x, y, self._pack(predictions.tensors), sample_weight=sample_weight)

    def _set_masks(self, predictions: BoundaryTensors) -> None:
        for tensor, mask in zip(*predictions, strict=True):
            set_mask(tensor, mask)
