"""What training under MirroredStrategy needs: variables on every device, a device's part of the loss."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.keras_private import mask_of, set_value
from pipetrain.compute.tensorflow_private import is_distributed, like
from pipetrain.frontend.compilation import check_masks, named
from pipetrain.frontend.loss_reduction import FEWEST_ROWS, divides, found_way, is_known, ways
from pipetrain.logs import counted

TOO_FEW = "data-parallel: a minibatch leaves a device without rows, and a layer keeps statistics of its rows."
LARGER = "Try data whose last minibatch is larger, or scheme='all-reduce'."


class DeviceLoss:
    """Changes a model's losses so that Keras' own step on every device makes the step of the whole minibatch.

    Keras divides the mean over a device's rows by the number of devices, and adds up gradients; but not a sum, and not
    a loss that is one number. With r of R rows on one of n devices, it is given what is such a mean, ``m``, so that
    ``sum m r / R`` is the minibatch's loss, and gradients are multiplied by ``n r / R``.

    Args:
        loss: as ``compile`` was given it.
        devices: how many there are.
        outputs: the model's.
        keeps_statistics: whether some layer keeps statistics of its rows, and cannot do without rows.

    Raises ValueError for losses that cannot be put together from the devices'.
    """

    def __init__(self, loss: Any, devices: int, outputs: Sequence[Any], keeps_statistics: bool) -> None:
        self._devices, self._keeps_statistics = devices, keeps_statistics
        self._loss = loss
        for each in keras.tree.flatten(loss) if devices > 1 else ():
            _check(each)
        self._ways = ways(loss, devices, outputs)
        if self._ways == ["divided"] and devices > 1:
            raise ValueError(
                "What this loss is divided by, no device knows: the labels that are not ignored, the sum of the sample "
                "weights, or the rows for some outputs and nothing for others. Received: scheme='data-parallel', "
                f"loss={named(loss)}. Try scheme='all-reduce'."
            )
        self._is_tried = devices == 1 or is_known(loss, outputs)
        self._tries = False

    def measure(self, compiled: Callable[..., Any], y: Any, sample_weight: Any, outputs: Any) -> None:
        """Try the compiled loss, if only that tells what kind it is, on labels and weights like these specs'.

        Raises ValueError if it is neither a mean nor a sum.
        """
        if self._is_tried:
            return

        def of(y: Any, flat: Any, weights: Any) -> Any:
            return compiled(y, keras.tree.pack_sequence_as(outputs, flat), weights)

        specs = [tf.TensorSpec(each.shape, each.dtype) for each in keras.tree.flatten(outputs)]
        y, sample_weight = keras.tree.map_structure(_ones, (y, sample_weight))
        self._tries = True
        try:
            self._ways = [found_way(self._ways, of, None, y, sample_weight, specs, named(self._loss))]
        finally:
            self._tries = False
        self._is_tried = True

    def check_rows(self, minibatches: Iterable[int]) -> None:
        """Raise ValueError if one of minibatches with so many rows leaves a device without rows that it needs.

        Each device has ``ceil(rows / devices)`` rows, as long as there are some.
        """
        for rows in minibatches if self._keeps_statistics else ():
            if (self._devices - 1) * math.ceil(rows / self._devices) >= rows and self._devices > 1:
                received = f"Received: a minibatch of {counted(rows, 'row')}, {self._devices} devices."
                raise ValueError(f"{TOO_FEW} {received} {LARGER}")

    def changed(self, loss: Any) -> Any:
        """The loss to minimise in place of this one."""
        if self._devices == 1:
            return loss
        loss = loss() if inspect.isclass(loss) else loss  # as Keras does
        if isinstance(loss, keras.losses.Loss):
            return _Changed(loss, self._as_mean)
        if callable(loss):

            @functools.wraps(loss)
            def of_part(y_true: Any, y_pred: Any) -> Any:
                return self._as_mean(loss(y_true, y_pred), y_pred, is_sum=False)

            return of_part
        return loss

    def of_part(self, loss: Any, x: Any, y_pred: Any, training: bool) -> Any:
        """The loss that Keras has made of a device's rows, with gradients for its part of the minibatch."""
        if self._devices == 1 or tf.distribute.get_replica_context() is None:
            return loss
        masks = [mask_of(each) for each in keras.tree.flatten(y_pred)]
        check_masks(masks, divides(self._loss), self._devices)
        if not training:
            return loss
        rows = tf.shape(next(each for each in keras.tree.flatten(x) if each is not None))[0]
        factor = self._devices * tf.cast(rows, "float32") / tf.cast(_of_all(rows), "float32")
        if self._keeps_statistics:
            with tf.control_dependencies([tf.debugging.assert_positive(rows, f"{TOO_FEW} {LARGER}")]):
                factor = tf.identity(factor)
        return _with_gradient(loss, factor)

    def _as_mean(self, values: Any, y_pred: Any, is_sum: bool) -> Any:
        """Values whose mean over all entries is ``m``."""
        if self._tries or tf.distribute.get_replica_context() is None:
            return values
        rows, one_number = tf.shape(keras.tree.flatten(y_pred)[0])[0], len(values.shape) == 0
        if one_number:
            values = tf.fill([rows], values)
        if self._ways[0] == "sum" if one_number else is_sum:
            entries = 1 if one_number else tf.size(values)
            parts = tf.math.divide_no_nan(tf.cast(entries * _of_all(rows), values.dtype), tf.cast(rows, values.dtype))
            values *= parts
        return values


def _ones(spec: Any) -> Any:
    """Labels or weights of this spec; the trial makes others of them."""
    return None if spec is None else tf.ones([FEWEST_ROWS, *(size or 1 for size in spec.shape[1:])], spec.dtype)


def _check(loss: Any) -> None:
    """Refuse what Keras reduces in a way that the devices' losses do not tell."""
    if isinstance(loss, keras.losses.Loss):
        if loss.reduction in (None, "none"):
            raise ValueError(
                "A loss that is not reduced cannot be put together from the devices'. Received: scheme='data-parallel',"
                f" loss={type(loss).__name__}(reduction={loss.reduction!r}). Try reduction='sum', or "
                "scheme='all-reduce'."
            )
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            raise ValueError(
                "Keras does not reduce this loss, and each device would take its own for the minibatch's. Received: "
                f"scheme='data-parallel', loss={type(loss).__name__}, which overrides __call__. Try overriding call, "
                "or another scheme."
            )


class _Changed(keras.losses.Loss):
    """A loss whose values are changed before Keras reduces them to their mean."""

    def __init__(self, loss: keras.losses.Loss, as_mean: Callable[..., Any]) -> None:
        self._is_sum = loss.reduction == "sum"
        reduction = "sum_over_batch_size" if self._is_sum else loss.reduction
        super().__init__(name=loss.name, reduction=reduction, dtype=loss.dtype)
        self._loss, self._as_mean = loss, as_mean

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """The loss's own values, changed."""
        return self._as_mean(self._loss.call(y_true, y_pred), y_pred, self._is_sum)


def _of_all(rows: tf.Tensor) -> tf.Tensor:
    """The rows of all devices together."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, rows)


@tf.custom_gradient
def _with_gradient(loss: tf.Tensor, factor: tf.Tensor) -> Any:
    """The loss, whose gradients are multiplied by a factor."""
    return tf.identity(loss), lambda upstream: (upstream * tf.cast(factor, upstream.dtype), None)


class _Pair(NamedTuple):
    """A variable, what it has by itself, and what it has on every device."""

    variable: keras.Variable
    own: tf.Variable
    mirrored: Any

    def mirror(self) -> None:
        """Every device gets the variable's value. Where layers have given each device another one, which nobody has
        changed since they were stored, each keeps its own.
        """
        value = self.own.numpy()
        if self.own.trainable or not np.array_equal(self.mirrored.numpy(), value, equal_nan=value.dtype.kind == "f"):
            self.mirrored.assign(value)

    def store(self) -> None:
        """The variable by itself gets the value of the first device, or what all devices have together."""
        self.own.assign(self.mirrored.read_value())


class Mirroring:
    """Lets variables have a value on each device of a strategy, as if they had been made in its scope.

    Whoever reads or assigns them meanwhile, whichever way, reads and assigns what trains. Otherwise they are as they
    were made, with the values last stored.

    Args:
        distribution: the strategy.
    """

    def __init__(self, distribution: tf.distribute.Strategy) -> None:
        self._distribution = distribution
        self._known: dict[int, _Pair] = {}  # of all variables so far: functions that were traced read these
        self._present: Sequence[_Pair] = ()

    @property
    def is_on(self) -> bool:
        """Whether the devices have the values."""
        return bool(self._present)

    def begin(self, variables: Iterable[keras.Variable]) -> None:
        """Give the devices the values of these variables; nothing has changed if this is interrupted."""
        pairs = [pair for each in variables if (pair := self._pair(each)) is not None]
        for pair in pairs:
            pair.mirror()
        self._present = pairs
        for pair in pairs:
            set_value(pair.variable, pair.mirrored)

    def store(self) -> None:
        """The variables by themselves get the values that the devices have."""
        for pair in self._present:
            pair.store()

    def end(self) -> None:
        """The variables are by themselves again, with the values that were stored last."""
        for pair in self._present:
            set_value(pair.variable, pair.own)
        self._present = ()

    def forget(self, but: Iterable[keras.Variable]) -> None:
        """Let the devices have no variables any more but these."""
        kept = {id(each) for each in but}
        self._known = {key: pair for key, pair in self._known.items() if key in kept}

    def agree(self) -> None:
        """Every device gets the first one's value of what layers have changed on each."""
        for pair in self._present:
            if not pair.own.trainable:
                pair.mirrored.assign(pair.mirrored.read_value())

    def _pair(self, variable: keras.Variable) -> _Pair | None:
        """None for what is made in a strategy's scope."""
        own = variable.value
        if is_distributed(own):
            return None
        known = self._known.get(id(variable))
        if known is None or known.own is not own:
            with self._distribution.scope():
                known = self._known[id(variable)] = _Pair(variable, own, like(own))
        return known
