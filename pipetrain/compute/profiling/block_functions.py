"""One block of a chain as a forward and a backward function, to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.functions.backward import may_wait
from pipetrain.compute.functions.kernels import by_xla, direct
from pipetrain.compute.functions.split import size_bytes, specs, split, symbolic_gradients
from pipetrain.compute.functions.weight_products import products
from pipetrain.compute.graph.segment import Segment, assigned_to


class Keeps(NamedTuple):
    """What a block saves for its backward: the bytes of its own, and which of its inputs and outputs."""

    inner_bytes: int
    inputs: list[bool]
    outputs: list[bool]


class BlockFunctions:
    """A block's forward and backward, called as a stage's are; equal blocks share one object.

    ``gradients`` are the symbolic gradients of its weights, ``forward_tensors`` and ``backward_tensors`` the numbers of
    tensors that go in and come out.

    Args:
        segment: the block.
        like: specs of its inputs.
        compiled: whether XLA compiles it, which may fail when it is called.
    """

    def __init__(self, segment: Segment, like: Sequence[tf.TensorSpec], compiled: bool = False) -> None:
        self._segment, self.compiled = segment, compiled
        self._traced: dict[str, list[Any]] = {}
        self._stays: list[int] = []
        self._changed: list[int] = []
        weights, state = specs(segment.trainable_variables), specs(segment.non_trainable_variables)
        with tf.device(None):  # it runs wherever it is called
            self._halves = split(
                self._run,
                weights,
                state,
                *self._sorted(like),
                compiled=compiled,
                stays=lambda: self._stays,
                changed=lambda: self._changed,
            )
        self._forward = either(self._halves.forward, compiled)
        self._backward = either(self._halves.backward, compiled)
        self.gradients = self._halves.backward.structured_outputs[0]
        self.forward_tensors, self.backward_tensors = _tensors(self._halves.forward), _tensors(self._halves.backward)

    def forward(
        self, weights: list[tf.Tensor], state: list[tf.Tensor], inputs: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The outputs of a block equal to this one, and its residuals, with the state that its backward reads."""
        (outputs, _), residuals = self._forward(weights, state, *self._sorted(inputs))
        return outputs, [*residuals, *(state[n] for n in self._halves.fixed)]

    def backward(self, weights: list[tf.Tensor], residuals: list[tf.Tensor], gradients: list[tf.Tensor]) -> Any:
        """The gradients of a block equal to this one."""
        count = len(self._halves.residuals)
        return self._backward(weights, residuals[:count], residuals[count:], gradients)

    def product_bytes(self, rows: int, minibatch_rows: int) -> int:
        """The bytes of weights whose gradients are made once for all microbatches of a minibatch.

        ``rows`` are those that the block is measured with.
        """
        weights = self._segment.trainable_variables
        once = products(symbolic_gradients(self._halves), rows, minibatch_rows)
        return sum(size_bytes(self.gradients[n]) for n in once if weights[n].regularizer is None)  # else it is a sum

    def late_bytes(self) -> int:
        """The bytes of weights whose gradients are products that may be made later than those of the inputs."""
        weights = specs(self._segment.trainable_variables)
        return sum(size_bytes(weights[n]) for n in may_wait(symbolic_gradients(self._halves)))

    @property
    def rows(self) -> list[int]:
        """The numbers of the weights whose gradients are rows."""
        return [n for n, each in enumerate(self.gradients) if isinstance(each, tf.IndexedSlices)]

    def ones(self, outputs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
        """Gradients of ones for those of its outputs that need one."""
        pairs = zip(outputs, self._segment.returns, strict=True)
        return [tf.ones(spec.shape, spec.dtype) for spec, returned in pairs if returned]

    def keeps(self, residuals: Sequence[tf.Tensor]) -> Keeps:
        """What is kept in these residuals; state that stays is kept anyway."""
        pairs = zip(self._halves.residuals, residuals, strict=False)
        sizes = {symbol.ref(): _saved_bytes(value) for symbol, value in pairs}
        inputs, outputs = self._traced["inputs"], self._traced["outputs"]
        known = {tensor.ref() for tensor in (*inputs, *outputs)}
        inner_bytes = sum(size for ref, size in sizes.items() if ref not in known)
        return Keeps(inner_bytes, [x.ref() in sizes for x in inputs], [x.ref() in sizes for x in outputs])

    def _run(self, weights: Any, state: Any, differentiable: Any, constants: Any) -> Any:
        segment = self._segment
        outputs, after, _, left = segment.run(weights, state, differentiable, constants, [None] * len(segment.reads))
        self._stays = [n for n, (old, new) in enumerate(zip(state, after, strict=True)) if new is old]
        self._changed = assigned_to(weights, left)
        flowing, still = iter(differentiable), iter(constants)
        inputs = [next(flowing if flow else still) for flow in segment.differentiable]
        self._traced.update(inputs=inputs, outputs=outputs)
        return [x for x, returned in zip(outputs, segment.returns, strict=True) if returned], (outputs, after)

    def _sorted(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        differentiable = self._segment.differentiable
        wanted = [x for x, flow in zip(inputs, differentiable, strict=True) if flow]
        return wanted, [x for x, flow in zip(inputs, differentiable, strict=True) if not flow]


def _saved_bytes(value: tf.Tensor) -> int:
    """Bytes of a tensor, or of the list of a loop's tensors, assumed to have four bytes a number."""
    if value.dtype == tf.resource:
        return 0
    if value.dtype != tf.variant:
        return size_bytes(tf.TensorSpec(value.shape, value.dtype))
    try:
        shape = tf.raw_ops.TensorListElementShape(input_handle=value, shape_type=tf.int32)
        length = tf.raw_ops.TensorListLength(input_handle=value)
    except tf.errors.OpError:  # something else
        return 0
    return 4 * int(length) * int(tf.reduce_prod(tf.maximum(shape, 0)))


def values(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """The variables' values on the device in scope."""
    return [tf.identity(variable.value) for variable in variables]


def either(concrete: Any, compiled: bool = False) -> Callable[..., Any]:
    """The function as one op, which XLA compiles or not; inside another function, called as such."""
    inside, call = concrete, None
    if compiled:
        inside, call = by_xla(concrete, *concrete.structured_input_signature[0])
    call = call or direct(concrete)
    return lambda *arguments: (call if tf.executing_eagerly() else inside)(*arguments)


def _tensors(concrete: Any) -> int:
    """How many tensors go in and come out, on which the overhead of a call depends."""
    return len(concrete.inputs) + len(concrete.outputs)
