"""A stage's forward and backward bound to its variables: calls read and predict the newest weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import inlined, made_when_needed
from pipetrain.compute.functions.kernels import Kernels


class Newest(NamedTuple):
    """The stage's newest weights, ``horizon`` updates ahead along the velocity: a description, not yet tensors."""

    horizon: int = 0


Weights = Newest | list[tf.Tensor]


class BoundFunction:
    """``call(weights, *others)`` for weights that are tensors, the newest, or predicted from the newest.

    Reading variables one by one from Python would cost more than a small stage's whole forward, and predicted
    weights need not exist outside the call that uses them.

    Args:
        call: a concrete function whose first argument are the weights.
        variables: the stage's variables.
        predicted: their values so many updates ahead, for a scalar tensor.
        constant: a number as a tensor of a type, on the stage's device.
        kernels: what runs it.
    """

    def __init__(
        self,
        call: Any,
        variables: Sequence[keras.Variable],
        predicted: Callable[[tf.Tensor], list[tf.Tensor]],
        constant: Callable[[float, tf.DType], tf.Tensor],
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        self._given = kernels.of(call)
        self._call, self._variables, self._predicted, self._constant = call, variables, predicted, constant
        self._others = call.structured_input_signature[0][1:]
        self._newest: Any = None
        self._ahead: Any = None

    def __call__(self, weights: Weights, *others: Any) -> Any:
        """Call with these weights."""
        if not isinstance(weights, Newest):
            return self._given(weights, *others)
        if not weights.horizon:
            if self._newest is None:
                self._newest = self._trace(self._with_newest)
            return self._newest(*others)
        if self._ahead is None:
            self._ahead = self._trace(self._with_predicted, tf.TensorSpec([]))
        return self._ahead(self._constant(float(weights.horizon), tf.float32), *others)

    def _with_newest(self, *others: Any) -> Any:
        return self._call([variable.value.read_value() for variable in self._variables], *others)

    def _with_predicted(self, horizon: tf.Tensor, *others: Any) -> Any:
        predicted = self._predicted(horizon)
        result = inlined(self._call, predicted, *others)
        made_when_needed(predicted)
        return result

    def _trace(self, function: Callable[..., Any], *first: tf.TensorSpec) -> Any:
        return self._kernels.op(function, *first, *self._others)


def any_rows(values: Any) -> Any:
    """Specs of nested tensors for any number of rows; None stays None."""

    def spec(value: Any) -> Any:
        if value is None:
            return None
        return tf.TensorSpec([None, *value.shape[1:]] if len(value.shape) else [], value.dtype)

    return tf.nest.map_structure(spec, values)
