"""Numbers that depend on how many rows a minibatch has: arguments of a program's function, one tensor for each use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipetrain.schemes.parts import Parts

KEPT = 8  # calls whose tensors are kept, by their minibatches' rows: most data have two numbers of them


class Numbers(NamedTuple):
    """One array of numbers on a device: its type and size, and what it is for a minibatch's parts and loss scale.

    ``minibatch`` is the number of that minibatch.
    """

    minibatch: int
    device: str
    dtype: tf.DType
    size: int
    of: Callable[[Parts, float], list[Any]]

    @property
    def spec(self) -> tf.TensorSpec:
        """Of the argument."""
        return tf.TensorSpec([self.size], self.dtype)


class NumberArguments:
    """The arrays that a function is given, made for each number of rows and kept on their devices.

    Args:
        numbers: the arrays.
        microbatches: of a minibatch.
    """

    def __init__(self, numbers: list[Numbers], microbatches: int) -> None:
        self._numbers, self._microbatches = numbers, microbatches
        self._made: dict[Any, list[tf.Tensor]] = {}

    def __call__(self, rows: Mapping[int, int], scale: float) -> list[tf.Tensor]:
        """For minibatches of so many rows, by their numbers, whose loss is multiplied by the scale."""
        if not self._numbers:
            return []
        key = tuple(rows.values()), scale
        made = self._made.get(key)
        if made is None:  # several threads may make them
            if len(self._made) >= KEPT:
                self._made.clear()
            parts = {number: Parts(each, self._microbatches) for number, each in rows.items()}
            self._made[key] = made = [_array(each, parts[each.minibatch], scale) for each in self._numbers]
        return made


def _array(numbers: Numbers, parts: Parts, scale: float) -> tf.Tensor:
    with tf.device(numbers.device):
        return tf.constant(np.array(numbers.of(parts, scale), numbers.dtype.as_numpy_dtype))
