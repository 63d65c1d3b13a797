"""A last stage's loss and outputs as one vector, for the controller to fetch from another process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

HERE = "/job:localhost/replica:0/task:0/device:CPU:0"


class Packed(NamedTuple):
    """The vector, wherever it is, and what one row of each output has for a shape."""

    vector: tf.Tensor
    shapes: list[tuple[int, ...]]

    def unpacked(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """The loss and the outputs, here; waits for them."""
        with tf.device(HERE):  # a copy of its own: as the argument of a function it would be a call of the worker
            loss, *rest = np.split(tf.identity(self.vector).numpy(), [1])
            sizes = [math.prod(shape) for shape in self.shapes]
            rows = rest[0].size // max(sum(sizes), 1)
            parts = np.split(rest[0], np.cumsum([rows * size for size in sizes])[:-1])
            pairs = zip(parts, self.shapes, strict=True)
            outputs = [tf.constant(part.reshape(rows, *shape)) for part, shape in pairs]
            return tf.constant(loss[0]), outputs


def packs(outputs: Sequence[tf.Tensor], loss: tf.Tensor) -> bool:
    """Whether loss and outputs are of one type, and of every output the rows alone are unknown."""
    alike = all(tensor.dtype == loss.dtype for tensor in outputs)
    return alike and all(
        tensor.shape.rank and tensor.shape[0] is None and tensor.shape[1:].is_fully_defined() for tensor in outputs
    )


def pack(outputs: Sequence[tf.Tensor], loss: tf.Tensor) -> tf.Tensor:
    """The vector: a fetch costs a message to each process, whatever its size; so one is fetched and not several."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in (loss, *outputs)], 0)
