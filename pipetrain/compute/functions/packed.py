"""A stage's residuals as one tensor, so that one call leaves one tensor for another to hold and release.

For every tensor that it releases, a thread gives up Python's global lock, for which others may be waiting; releasing a
tensor of another process takes a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import origin

# Never in a GPU's memory, where all that is in a GPU's pack has to be.
APART = (tf.int32, tf.string, tf.resource, tf.variant)


def packed(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors that can be packed as one tensor, without a copy; then the others."""
    together = [tensor for tensor in tensors if tensor.dtype not in APART]
    apart = [tensor for tensor in tensors if tensor.dtype in APART]
    return [tf.raw_ops.OptionalFromValue(components=together), *apart] if together else apart


def packed_specs(specs: Sequence[tf.TensorSpec]) -> list[tf.TensorSpec]:
    """The specs of what ``packed`` makes of tensors with these specs."""
    apart = [spec for spec in specs if spec.dtype in APART]
    return apart if len(apart) == len(specs) else [tf.TensorSpec([], tf.variant), *apart]


def unpacked(given: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """The tensors with these specs that ``packed`` was given; the same tensors where it was called in this graph."""
    together = [spec for spec in specs if spec.dtype not in APART]
    apart, values = iter(given[bool(together) :]), iter(_values(given[0], together) if together else ())
    return [next(apart) if spec.dtype in APART else next(values) for spec in specs]


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
