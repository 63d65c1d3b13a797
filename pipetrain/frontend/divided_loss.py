"""The compiled loss of a part of a minibatch, such that those of all parts add up to the minibatch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.keras_private import loss_of, mask_of, untracked
from pipetrain.frontend.loss_reduction import Divisor, divides_by, ignored_class


class Divided(NamedTuple):
    """In place of sample weights: these, and in each row what the minibatch's losses are divided by, one for each."""

    sample_weight: Any
    divisors: tf.Tensor


def undivided(sample_weight: Any) -> Any:
    """The sample weights themselves."""
    return sample_weight.sample_weight if isinstance(sample_weight, Divided) else sample_weight


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
