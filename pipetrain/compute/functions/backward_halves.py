"""A backward cut in two: the gradients of a stage's inputs, and after them those of its weights.

An operation of the backward's graph that leads to the gradient of one weight and to nothing else may wait: the product
of a dense layer's inputs and the gradients of its outputs, a convolution's filter gradient. All others lead to the
inputs' gradients, or to several weights', and are done first: the chain from layer to layer, and all of a layer whose
gradients are made in one operation, such as a normalization. A loop over a recurrent layer's turns is done first too,
but the products of its kernels' gradients come after it, see ``weight_products``, and wait. Nothing is done twice. What
the second half reads of the first one and of the residuals are its *operands*: in a dense layer its inputs and the
gradients of its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import inputs_of, only_for, packer, some_of
from pipetrain.compute.functions.stage_values import SEPARATE, Packing

Gradients = list[Any]


# With oneDNN TensorFlow replaces such an operation and a BiasAddGrad of the same gradients by one, and takes any two
# outputs of one operation, such as the one that opens a pack, for the same gradients.
ONE_BY_ONE = ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")


class BackwardHalves:
    """The halves of a concrete ``backward(weights, residuals, fixed, output_gradients)``, see ``split``.

    ``operands`` are the specs of what the first half hands to the second one, and ``packing`` how.

    Args:
        backward: the concrete function.
        packing: that of residuals.
    """

    def __init__(self, backward: Any, packing: Packing) -> None:
        self._backward = backward
        by_weight, by_input = backward.structured_outputs
        self._pack_by_weight, self._pack_by_input = packer(by_weight), packer(by_input)
        count = len(backward.outputs) - len(by_input)
        self._by_weight, self._by_input = backward.outputs[:count], backward.outputs[count:]
        late = _late(self._by_weight)
        self._late = {*late}
        graph = backward.graph
        weights = backward.structured_input_signature[0][0]
        self._weights = len(weights)
        given = {each.ref() for each in (*graph.inputs[: self._weights], *graph.internal_captures)}
        read = {tensor.ref(): tensor for operation in late.values() for tensor in operation.inputs}
        read.update({tensor.ref(): tensor for tensor in self._by_weight if tensor.op.name not in late})
        self._operands = [
            tensor
            for ref, tensor in read.items()
            if tensor.op.name not in late and ref not in given and tensor.op.type != "Const"
        ]
        self.operands = [tf.TensorSpec(each.shape, _handed(each.dtype)) for each in self._operands]
        self.packing = SEPARATE if any(each.type in ONE_BY_ONE for each in late.values()) else packing

    def input_gradients(self, *arguments: Any) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The gradients of the inputs and the packed operands, for the backward's arguments."""
        wanted, given = [*self._by_input, *self._operands], inputs_of(self._backward, arguments)
        made = some_of(self._backward, wanted, self._late, given, {})
        operands = [tf.cast(each, _handed(each.dtype)) for each in made[len(self._by_input) :]]
        return self._pack_by_input(iter(made)), self.packing.pack(operands)

    def weight_gradients(self, weights: Sequence[tf.Tensor], packed: Sequence[tf.Tensor]) -> Gradients:
        """The gradients of the weights, from the packed operands."""
        operands = self.packing.unpack(packed, self.operands)
        graph, calling = self._backward.graph, tf.compat.v1.get_default_graph()
        captures = [calling.capture(each) for each in self._backward.captured_inputs]
        between: list[tf.Tensor | None] = [None] * (len(graph.inputs) - self._weights - len(captures))
        early = {each.name for each in graph.get_operations() if each.type != "Const"} - self._late
        pairs = zip(self._operands, operands, strict=True)
        instead = {tensor.name: tf.cast(value, tensor.dtype) for tensor, value in pairs}
        made = some_of(self._backward, self._by_weight, early, [*weights, *between, *captures], instead)
        return list(self._pack_by_weight(iter(made)))


def may_wait(gradients: Sequence[Any]) -> set[int]:
    """Which of these weights' gradients in a graph are products or convolutions that are made in the second half."""
    tensors = [tf.nest.flatten(each, expand_composites=True) for each in gradients]
    late = _late([tensor for each in tensors for tensor in each if tensor is not None])
    return {
        n
        for n, each in enumerate(tensors)
        if any(_is_product(late[made.name]) for t in each if t is not None for made in only_for(t) if made.name in late)
    }


def _is_product(operation: tf.Operation) -> bool:
    return any(name in operation.type for name in ("MatMul", "Einsum", "BackpropFilter"))


def _handed(dtype: tf.DType) -> tf.DType:
    """As which type a tensor leaves a function: not int32, which on a GPU lives on the host."""
    return tf.int64 if dtype == tf.int32 else dtype


def _late(gradients: Sequence[tf.Tensor]) -> dict[str, tf.Operation]:
    """The operations that lead to one of these gradients and to nothing else, by name."""
    late = {operation.name: operation for gradient in gradients for operation in only_for(gradient)}
    while early := [
        name for name, operation in late.items() if any(each.name not in late for each in _readers(operation))
    ]:
        for name in early:  # it leads to what cannot wait, such as a stateful operation
            del late[name]
    return late


def _readers(operation: tf.Operation) -> list[tf.Operation]:
    return [reader for output in operation.outputs for reader in output.consumers()]
