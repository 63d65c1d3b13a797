"""Losses and metrics of the minibatches that a runner gives back, as Keras keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from pipetrain.compute.cores import HOST
from pipetrain.compute.functions.kernels import direct
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.functions.weight_binding import any_rows
from pipetrain.compute.graph.inputs import packed
from pipetrain.compute.keras_private import (
    built_when_traced,
    compiled_loss,
    count_of,
    has_metrics,
    loss_of,
    mask_of,
    overridden,
    set_mask,
    untracked,
    update_loss,
)
from pipetrain.frontend.contexts import undone
from pipetrain.frontend.loss_reduction import Divisor, divides_by, ignored_class
from pipetrain.run.collector import Result
from pipetrain.run.window import Minibatch
from pipetrain.run.worker_rows import on_one_device


class Divided(NamedTuple):
    """In place of sample weights: these, and in each row what the minibatch's losses are divided by, one for each."""

    sample_weight: Any
    divisors: tf.Tensor


def undivided(sample_weight: Any) -> Any:
    """The sample weights themselves."""
    return sample_weight.sample_weight if isinstance(sample_weight, Divided) else sample_weight


def divided_together(parts: Sequence[Any], devices: Sequence[str]) -> list[Any]:
    """``Divided`` sample weights of a minibatch's parts, each on its device, with what all of them is divided by."""
    divisors = []
    for part, device in zip(parts, devices, strict=True):
        with tf.device(device):
            divisors.append(tf.reduce_max(part.divisors, 0))  # every row has the same
    found = []
    for part, device in zip(parts, devices, strict=True):
        with tf.device(device):
            found.append(part._replace(divisors=tf.ones_like(part.divisors) * tf.add_n(divisors)))
    return found


class DividedLoss:
    """Sums over a part's entries, divided by what the whole minibatch's are divided by, which the labels tell.

    That of parts p is ``sum_p numerator_p / denominator``, where the denominator is the number of rows, of entries that
    are neither masked nor of an ignored class, or the sum of the sample weights.

    Args:
        compiled: Keras' compiled loss.
        loss: as ``compile`` was given it.
        outputs: symbolic tensors, in the structure of the model's outputs.
    """

    def __init__(self, compiled: Any, loss: Any, outputs: Any) -> None:
        wrapped = keras.tree.map_structure(lambda each: None if each is None else _OfPart(each, self._of_one), loss)
        self._compiled, self._outputs = untracked(compiled, wrapped), outputs
        self._rows: Any = None
        self._divisors: list[tf.Tensor] = []
        self._masks: dict[int, Any] = {}  # of the symbolic outputs
        self._counts = False  # whether the divisors are being found, else they are used

    def with_divisors(self, y: Any, sample_weight: Any, rows: tf.Tensor, masks: Sequence[Any] = ()) -> Divided:
        """What a minibatch of so many rows is given to its parts with; ``masks`` are those of its outputs."""
        self._counts, self._rows, self._divisors = True, tf.cast(rows, keras.config.floatx()), []
        outputs = keras.tree.flatten(self._outputs)
        self._masks = {id(output): mask for output, mask in zip(outputs, masks, strict=False)}
        with keras.StatelessScope():
            self._compiled(y, self._outputs, sample_weight)
        return Divided(sample_weight, tf.tile(tf.stack(self._divisors)[None], [rows, 1]))

    def __call__(self, y: Any, outputs: Any, given: Divided) -> tf.Tensor:
        """The part's share of the loss, of its rows of what ``with_divisors`` gave."""
        self._counts, self._rows = False, tf.shape(given.divisors)[0]
        self._divisors = tf.unstack(tf.reduce_max(given.divisors, 0))  # every row has the same
        return self._compiled(y, outputs, given.sample_weight)

    def _of_one(self, loss: keras.losses.Loss, y: Any, outputs: Any, sample_weight: Any) -> tf.Tensor:
        if self._counts:
            mask = self._masks.get(id(outputs))
            divisor = divides_by(loss, sample_weight, mask is not None)
            self._divisors.append(self._divisor(divisor, loss, y, sample_weight, mask))
            return tf.zeros([])
        divisor = divides_by(loss, sample_weight, mask_of(outputs) is not None)
        whole = self._divisors.pop(0)
        if divisor == "nothing":
            return loss(y, outputs, sample_weight)
        if divisor == "rows":
            value = loss(y, outputs, sample_weight)
            return value * tf.math.divide_no_nan(tf.cast(self._rows, value.dtype), tf.cast(whole, value.dtype))
        value = _summed(loss)(y, outputs, sample_weight)
        return tf.math.divide_no_nan(value, tf.cast(whole, value.dtype))

    def _divisor(self, by: Divisor, loss: keras.losses.Loss, y: Any, sample_weight: Any, mask: Any) -> tf.Tensor:
        if by in ("nothing", "rows"):
            return self._rows
        factors = [] if mask is None else [mask]
        if (ignored := ignored_class(loss)) is not None:
            labels = tf.cast(y, loss.dtype)
            factors.append(labels != tf.cast(ignored, labels.dtype))
        if by == "weights":
            factors.append(sample_weight)
        product, *others = [tf.cast(each, self._rows.dtype) for each in factors]
        for each in others:
            alike = each.shape.rank == product.shape.rank
            product *= each if alike else tf.reshape(each, tf.shape(product))  # one has a last dimension of 1 more
        return tf.reduce_sum(product)


def _summed(loss: keras.losses.Loss) -> keras.losses.Loss:
    """The same loss without the division; ``copy.copy`` would make one from its config, which it need not have."""
    summed = object.__new__(type(loss))
    vars(summed).update({**vars(loss), "reduction": "sum"})
    return summed


class _OfPart(keras.losses.Loss):
    """Asks ``of_one`` for the loss of one output."""

    def __init__(self, loss: Any, of_one: Callable[..., tf.Tensor]) -> None:
        super().__init__(name="of_part")
        self._loss, self._of_one = loss, of_one

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        return self._of_one(loss_of(self._loss, y_true, y_pred), y_true, y_pred, sample_weight)


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
            given_now = inputs, minibatch.y, undivided(minibatch.sample_weight)
            targets_now = on_one_device(given_now, HOST, body != self._update_train or self.read_predictions)
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
