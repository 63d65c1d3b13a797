"""Gradients before an update: loss scaling, and clipping by the norm of a whole model's gradients.

With loss scaling the loss whose gradients are computed is multiplied by a number, by which they are divided again:
small gradients would be zero in float16. An optimizer's ``loss_scale_factor`` is such a number; in Keras'
``LossScaleOptimizer``, which wraps the optimizer that makes the steps, it changes while training goes on. Of a whole
model's gradients each stage has some, so the norm is of all stages together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.keras_private import count_of
from pipetrain.compute.optimizer.slots import whole

SQUARED_NORM = tf.TensorSpec([], tf.float64)  # whatever types the stages' weights have: they are added


def squared_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """``sum(g**2)`` over all elements of all gradients; None counts nothing.

    The rows of an embedding's gradient are squared one by one, as Keras does, though some may be of the same word.
    """
    present = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients if each is not None]
    squares = [tf.cast(tf.reduce_sum(tf.square(each)), SQUARED_NORM.dtype) for each in present]
    return tf.reduce_sum(tf.stack(squares)) if squares else tf.zeros([], SQUARED_NORM.dtype)


def clipped(gradients: Sequence[Any], squared_norms: tf.Tensor, clipnorm: float) -> list[Any]:
    """``g * c * min(1/n, 1/c)`` with ``n**2`` the sum of ``squared_norms``, one of each stage, and c the ``clipnorm``.

    Keras' rule for ``global_clipnorm``: a norm that is not finite makes every gradient NaN, and rows of an embedding
    become the whole gradient, so that optimizers that square it count words that occur twice correctly.
    """
    norm = tf.sqrt(tf.reduce_sum(squared_norms))
    scale = clipnorm * tf.minimum(1.0 / norm, 1.0 / clipnorm) + (norm - norm)
    return [None if each is None else tf.convert_to_tensor(each) * tf.cast(scale, each.dtype) for each in gradients]


def limit(clipnorm: float | None) -> float | None:
    """The norm to clip to; None for values by which Keras does not clip."""
    return clipnorm if clipnorm and clipnorm > 0 else None


SCALE = tf.TensorSpec([], tf.float64)  # as Python has it: it is rounded where a gradient is divided


class LossScale(NamedTuple):
    """The scale of one minibatch's loss, and what the next one's depends on.

    ``growth_steps``: the scale is doubled after so many steps in a row; None where it stays as it is. ``finite_steps``:
    those made since it was last changed. ``stepped``: all steps made, which are fewer than the minibatches where some
    were skipped.
    """

    scale: float = 1.0
    growth_steps: int | None = None
    finite_steps: int = 0
    stepped: int = 0

    @property
    def is_dynamic(self) -> bool:
        """Whether it changes, and steps are skipped."""
        return self.growth_steps is not None

    def after(self, finite: bool) -> LossScale:
        """That of the next minibatch: halved if not all of this one's gradients were ``finite``, by Keras' rule."""
        if self.growth_steps is None:
            return self
        if not finite:
            return self._replace(scale=_rounded(self.scale * 0.5), finite_steps=0)
        if self.finite_steps == self.growth_steps - 1:
            return self._replace(scale=_rounded(self.scale * 2.0), finite_steps=0, stepped=self.stepped + 1)
        return self._replace(finite_steps=self.finite_steps + 1, stepped=self.stepped + 1)

    @classmethod
    def of(cls, optimizer: keras.optimizers.Optimizer) -> LossScale:
        """That of an optimizer, which is built if it has a dynamic one."""
        if is_dynamic(optimizer):
            scale, finite_steps = float(optimizer.dynamic_scale.numpy()), int(optimizer.step_counter.numpy())
            return cls(scale, optimizer.dynamic_growth_steps, finite_steps)
        factor = optimizer.loss_scale_factor
        return cls() if factor is None else cls(float(factor))

    def hand_back(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Let the optimizer go on from here, if its scale is dynamic; its count grows by the steps that were made."""
        if self.is_dynamic:
            optimizer.dynamic_scale.assign(self.scale)
            optimizer.step_counter.assign(self.finite_steps)
            count_of(stepping(optimizer)).assign_add(self.stepped)


def is_dynamic(optimizer: Any) -> bool:
    """Whether steps are skipped where a gradient is not finite, and the scale is changed."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def stepping(optimizer: Any) -> Any:
    """The optimizer that makes the steps: the one that a ``LossScaleOptimizer`` wraps, any other itself."""
    return optimizer.inner_optimizer if is_dynamic(optimizer) else optimizer


def build_scale(optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]) -> None:
    """Give a ``LossScaleOptimizer`` its own variables, if it has none; the optimizer that it wraps is built."""
    if is_dynamic(optimizer) and not optimizer.built:
        inner = vars(stepping(optimizer))
        inner["build"] = lambda variables: None  # Keras would build it again
        try:
            with whole(optimizer):
                optimizer.build(list(weights))
        finally:
            del inner["build"]


def unscaled(gradients: Sequence[Any], scale: tf.Tensor) -> list[Any]:
    """The gradients divided by the scale, in float32 at least; None stays None."""
    return [_unscaled(each, scale) for each in gradients]


def all_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Whether every element of every gradient is finite; None is nothing."""
    present = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients if each is not None]
    return tf.reduce_all(tf.stack([tf.constant(True), *(tf.reduce_all(tf.math.is_finite(each)) for each in present)]))


def _unscaled(gradient: Any, scale: tf.Tensor) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_unscaled(gradient.values, scale), gradient.indices, gradient.dense_shape)
    wide = tf.float32 if gradient.dtype.size < tf.float32.size else gradient.dtype
    return tf.cast(tf.cast(gradient, wide) / tf.cast(scale, wide), gradient.dtype)


def _rounded(scale: float) -> float:
    """The scale in the type of Keras' variable."""
    with np.errstate(over="ignore"):
        return float(np.float32(scale))
