"""What goes into a stage's functions, and what comes out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class Constants:
    """Makes tensors of numbers on a device, and keeps them for later calls.

    Args:
        device: a TensorFlow device name.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._made: dict[Any, tf.Tensor] = {}

    def __call__(self, value: Any, dtype: tf.DType) -> tf.Tensor:
        """The number, or numbers, as a tensor of this type; a tensor of this type is returned as it is.

        While a function is traced the tensor is still a kept one, which the function captures.
        """
        if isinstance(value, tf.Tensor):
            return value if value.dtype == dtype else tf.cast(value, dtype)
        if isinstance(value, tuple) and any(isinstance(each, tf.Tensor) for each in value):
            return tf.stack([tf.cast(each, dtype) for each in value])
        if (value, dtype) not in self._made:
            with tf.init_scope(), tf.device(self._device):
                self._made[value, dtype] = tf.constant(value, dtype)
        return self._made[value, dtype]

    def clear(self) -> None:
        """Keep none of them any more."""
        self._made.clear()


class BoundaryTensors(NamedTuple):
    """What crosses a cut: tensors, and the Keras mask that each carries (None for most)."""

    tensors: list[tf.Tensor]
    masks: list[tf.Tensor | None]


def without_rows(like: tf.Tensor) -> tf.Tensor:
    """A tensor of as many dimensions, and no rows."""
    return tf.zeros([0, *(size or 0 for size in like.shape[1:])], like.dtype)


class Forward(NamedTuple):
    """The results of a stage's forward: outputs, the loss (last stage), its layers' own losses, and ``kept``.

    The loss is a number, or one for every example where it is not to be reduced. ``kept`` is for its backward; it is
    None where there is no backward.
    """

    output: BoundaryTensors
    loss: tf.Tensor | None
    penalty: tf.Tensor | None
    kept: SavedForBackward | None


class SavedForBackward(NamedTuple):
    """What a forward leaves for its backward: packed residuals, or with recomputation the forward's inputs.

    ``weights`` are those of the forward if the backward has others; ``inputs`` end with the values that were drawn, if
    any were.
    """

    residuals: list[tf.Tensor] | None
    weights: Any = None
    state: Sequence[tf.Tensor] = ()
    inputs: Any = None


class Operands(NamedTuple):
    """What the first halves of some microbatches' backwards leave for the second ones: of each the packed tensors."""

    packed: list[list[tf.Tensor]]


class Inputs(NamedTuple):
    """A forward's inputs other than weights: what crosses the cut and, at the last stage, labels and sample weights."""

    values: BoundaryTensors
    targets: Any = None


class Step(NamedTuple):
    """The inputs of an update other than gradients; a rate of None leaves a learning-rate schedule unchanged.

    The gradients are those of a loss that was multiplied by the ``loss_scale``.
    """

    learning_rate: float | None
    staleness: int = 0
    loss_scale: float = 1.0


class BackwardResult(NamedTuple):
    """The results of a backward: gradients of the weights, and of inputs.

    Where the call has ``updated`` the stage's own weights, only the gradients of those that it shares are left. For a
    forward in the same call also its results, and the time when it was finished (``time.perf_counter``; in a
    function that is traced the time of day, as a tensor), if known.
    """

    gradients: list[Any]
    by_input: list[tf.Tensor]
    updated: bool = False
    forward: Forward | None = None
    forward_end_s: Any = None
