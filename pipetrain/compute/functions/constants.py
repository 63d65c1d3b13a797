"""Numbers as tensors that calls of functions are given again and again."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Constants:
    """Makes tensors of numbers, on the device whose scope it is called in, and keeps them for later calls."""

    def __init__(self) -> None:
        self._made: dict[Any, tf.Tensor] = {}

    def __call__(self, value: Any, dtype: tf.DType) -> tf.Tensor:
        """The number, or numbers, as a tensor of this type; a tensor is returned as it is."""
        if isinstance(value, tf.Tensor):
            return value
        if (value, dtype) not in self._made:
            self._made[value, dtype] = tf.constant(value, dtype)
        return self._made[value, dtype]

    def clear(self) -> None:
        """Keep none of them any more."""
        self._made.clear()
