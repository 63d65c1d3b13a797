"""A stage's residuals as one tensor of each type, for devices of other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.split import SplitFunction, specs

OPAQUE = (tf.variant, tf.resource)  # no lists of these


def packed(halves: SplitFunction) -> SplitFunction:
    """The same functions, which hand over lists of tensors where there were tensors: nothing is copied.

    Every tensor that the controller knows of a worker costs a message when it is let go.
    """
    residuals = specs(halves.residuals)
    kinds = sorted({spec.dtype for spec in residuals if spec.dtype not in OPAQUE}, key=lambda dtype: dtype.name)

    def forward(*arguments: Any) -> Any:
        aux, kept = halves.forward(*arguments)
        alone = [tensor for tensor in kept if tensor.dtype in OPAQUE]
        return aux, [_listed([each for each in kept if each.dtype == kind], kind) for kind in kinds] + alone

    def backward(weights: Any, given: list[tf.Tensor], gradients: Any) -> Any:
        of_kind = {kind: iter(range(len(residuals))) for kind in kinds}
        lists, alone = dict(zip(kinds, given, strict=False)), iter(given[len(kinds) :])
        kept = [
            next(alone) if spec.dtype in OPAQUE else _item(lists[spec.dtype], next(of_kind[spec.dtype]), spec)
            for spec in residuals
        ]
        return halves.backward(weights, kept, gradients)

    traced = _traced(forward, halves.forward, halves.forward.structured_input_signature[0])
    weights, _, gradients = halves.backward.structured_input_signature[0]
    handed = specs(traced.structured_outputs[1])
    pulled = _traced(backward, halves.backward, (weights, handed, gradients))
    return halves._replace(forward=traced, backward=pulled)


def _traced(function: Any, inner: Any, signature: Sequence[Any]) -> Any:
    concrete = tf.function(function, autograph=False).get_concrete_function(*signature)
    concrete.graph.inner = inner  # its functions are no longer known to TensorFlow once it is gone
    return concrete


def _listed(tensors: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    handle = tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=dtype)
    for tensor in tensors:
        handle = tf.raw_ops.TensorListPushBack(input_handle=handle, tensor=tensor)
    return handle


def _item(handle: tf.Tensor, index: int, spec: tf.TensorSpec) -> tf.Tensor:
    shape = -1 if spec.shape.rank is None else [-1 if size is None else size for size in spec.shape]
    item = tf.raw_ops.TensorListGetItem(
        input_handle=handle, index=index, element_shape=tf.constant(shape, tf.int32), element_dtype=spec.dtype
    )
    item.set_shape(spec.shape)
    return item
