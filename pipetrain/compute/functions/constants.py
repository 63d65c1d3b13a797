"""Numbers as tensors that calls of functions are given again and again."""

from __future__ import annotations

from typing import Any

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
