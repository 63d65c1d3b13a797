"""Clipping by the norm of a whole model's gradients, of which each stage has some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

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
