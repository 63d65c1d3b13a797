"""A stage's residuals as one tensor: what one call leaves for another is then one thing to hold, and to let go.

Every tensor that Python knows of takes Python's lock from the thread that lets it go, for which others may be waiting;
one of another process costs a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.inlined import inlined

APART = (tf.int32, tf.string, tf.resource, tf.variant)  # on the host, wherever the others are


def packing(forward: Any) -> Any:
    """The same function ``(...) -> (aux, residuals)``, with its residuals packed. Nothing is copied."""

    def run(*arguments: Any) -> Any:
        aux, residuals = inlined(forward, *arguments)
        return aux, packed(residuals)

    concrete = tf.function(run, autograph=False).get_concrete_function(*forward.structured_input_signature[0])
    concrete.graph.inner = forward  # its loops' functions are no longer known to TensorFlow once it is gone
    return concrete


def packed(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Those that can be, as one; then the others."""
    together = [tensor for tensor in tensors if tensor.dtype not in APART]
    apart = [tensor for tensor in tensors if tensor.dtype in APART]
    return [tf.raw_ops.OptionalFromValue(components=together), *apart] if together else apart


def packed_specs(specs: Sequence[tf.TensorSpec]) -> list[tf.TensorSpec]:
    """Of what ``packed`` makes of tensors with these specs."""
    apart = [spec for spec in specs if spec.dtype in APART]
    return apart if len(apart) == len(specs) else [tf.TensorSpec([], tf.variant), *apart]


def unpacked(given: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """The tensors of these specs that ``packed`` was given."""
    together = [spec for spec in specs if spec.dtype not in APART]
    pack, apart = given[: bool(together)], iter(given[bool(together) :])
    values = iter(
        tf.raw_ops.OptionalGetValue(
            optional=pack[0],
            output_types=[spec.dtype for spec in together],
            output_shapes=[spec.shape for spec in together],
        )
        if together
        else ()
    )
    return [next(apart) if spec.dtype in APART else next(values) for spec in specs]
