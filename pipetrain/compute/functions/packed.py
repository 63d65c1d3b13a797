"""A stage's residuals as few tensors, so that one call leaves few tensors for another to hold and release.

For every tensor that it releases, a thread gives up Python's global lock, for which others may be waiting; releasing a
tensor of another process takes a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import origin

# Never in a GPU's memory, where all that is in a GPU's pack has to be.
APART = (tf.int32, tf.string, tf.resource, tf.variant)
Packed = TypeVar("Packed", tf.Tensor, tf.TensorSpec)
MOST = 64  # tensors of a pack: TensorFlow takes four times as long to prepare a function with packs twice as large


def packed(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors that can be packed as a tensor for each ``MOST`` of them, without a copy; then the others."""
    together = [tensor for tensor in tensors if tensor.dtype not in APART]
    apart = [tensor for tensor in tensors if tensor.dtype in APART]
    return [*(tf.raw_ops.OptionalFromValue(components=each) for each in _packs(together)), *apart]


def packed_specs(specs: Sequence[tf.TensorSpec]) -> list[tf.TensorSpec]:
    """The specs of what ``packed`` makes of tensors with these specs."""
    together = [spec for spec in specs if spec.dtype not in APART]
    apart = [spec for spec in specs if spec.dtype in APART]
    return [*(tf.TensorSpec([], tf.variant) for _ in _packs(together)), *apart]


def unpacked(given: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """The tensors with these specs that ``packed`` was given; the same tensors where it was called in this graph."""
    packs = _packs([spec for spec in specs if spec.dtype not in APART])
    apart = iter(given[len(packs) :])
    values = (value for pack, like in zip(given, packs, strict=False) for value in _values(pack, like))
    return [next(apart) if spec.dtype in APART else next(values) for spec in specs]


def _packs(values: Sequence[Packed]) -> list[list[Packed]]:
    return [list(values[first : first + MOST]) for first in range(0, len(values), MOST)]


class Packing(NamedTuple):
    """How residuals leave a function and enter another: what is made of them, its specs, and the way back."""

    pack: Callable[[list[tf.Tensor]], list[tf.Tensor]]
    specs: Callable[[Sequence[tf.TensorSpec]], list[tf.TensorSpec]]
    unpack: Callable[[Sequence[tf.Tensor], Sequence[tf.TensorSpec]], list[tf.Tensor]]


PACKED = Packing(packed, packed_specs, unpacked)
SEPARATE = Packing(list, list, lambda given, specs: list(given))


def _values(pack: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> Sequence[tf.Tensor]:
    made_by = origin(pack)
    if made_by.type == "OptionalFromValue":
        return list(made_by.inputs)
    types, shapes = [spec.dtype for spec in specs], [spec.shape for spec in specs]
    return list(tf.raw_ops.OptionalGetValue(optional=pack, output_types=types, output_shapes=shapes))
