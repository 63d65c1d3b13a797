"""Forward and backward as two TensorFlow functions whose weights are arguments of both.

A single trace runs the forward under a gradient tape and builds the backward as a function nested in it. What
that nested function captures is exactly what the forward must hand over:

- a *weight* it captured is an argument of the backward too, so the backward may read another version, unless a layer
  assigns to it in the forward: the backward then reads what the forward read;
- what comes *from outside* of both (a constant or variable that a custom gradient reads) is read by the backward
itself;
- *state that stays* as it is (frozen weights, unless a layer assigns to them) is an argument of both as well: nothing
  keeps a copy of it;
- what was computed *from weights and such state alone* (a cast, a reshape of gamma, a frozen kernel with the product of
  low-rank adapters added) is computed again from these, and so is the maximum pooling of a tensor that the backward has
  anyway;
- of a tensor of which it reads nothing but the *shape* (as gradients of sums do, where the number of rows is not
  known), only the shape is handed over: half of what some networks would keep;
- everything else is a *residual*: returned by the forward, saved, and passed to the backward. What a loop keeps of its
  turns is a list of tensors, which no function that XLA compiles can return or take, and which no worker can hold from
  one function to the next: there it is handed over as one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import made_when_needed, operations, packer
from pipetrain.compute.functions.weight_products import once_after_loops
from pipetrain.compute.tensorflow_private import body_of, traced_for_xla

Run = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor], Sequence[tf.Tensor], Any], tuple[Sequence[tf.Tensor], Any]]


class SplitFunction(NamedTuple):
    """The two halves of one training step of a stage, traced once each.

    ``forward(weights, state, differentiable, constants) -> (aux, residuals)``, where residuals are as ``split`` is
    asked to hand them over, and ``backward(weights, residuals, fixed, output_gradients) -> (weight_gradients,
    input_gradients)``; the gradient of a weight that the outputs do not depend on is None. ``differentiable`` are the
    inputs that want a gradient, ``constants`` those that want none. ``state`` are tensors that have no gradients: those
    that training changes (BatchNorm statistics, seeds) go in, and come out in ``aux``. ``outputs`` are the specs of
    what is differentiated, ``residuals`` the symbolic tensors that are saved. ``reached`` says on which differentiable
    inputs the outputs depend: only these are given a gradient. ``fixed`` are the numbers of the state that the backward
    is to be given as it is.
    """

    forward: Any
    backward: Any
    outputs: list[tf.TensorSpec]
    residuals: list[tf.Tensor]
    reached: list[bool]
    fixed: list[int]


def split(
    run: Run,
    weights: Any,
    state: Any,
    differentiable: Any,
    constants: Any,
    handed: Callable[[list[tf.Tensor]], Any] = list,
    stacked: bool = False,
    compiled: bool = False,
    stays: Callable[[], Collection[int]] = tuple,
    changed: Callable[[], Collection[int]] = tuple,
) -> SplitFunction:
    """Trace ``run(weights, state, differentiable, constants) -> (outputs, aux)`` into forward and backward functions.

    Args:
        run: the computation; ``outputs`` are the floating-point tensors that gradients start from.
        weights: a list of ``tf.TensorSpec``.
        state: likewise.
        differentiable: likewise.
        constants: any nested structure of such.
        handed: what the forward is to give of its residuals; the backward takes these as they are.
        stacked: whether a list of tensors is handed over as one tensor; it always is where XLA compiles.
        compiled: whether XLA is to compile them.
        stays: the numbers of the state that ``run`` leaves as it is, asked when it has been traced.
        changed: the numbers of the weights that ``run`` assigns to, asked when it has been traced.
    """
    halves: dict[str, Any] = {}

    def forward(
        weights: list[tf.Tensor], state: list[tf.Tensor], differentiable: list[tf.Tensor], constants: Any
    ) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*weights, *differentiable])
            outputs, aux = run(weights, state, differentiable, constants)

        def differentiate(output_gradients: list[tf.Tensor]) -> Any:
            none = [None] * len(weights), [None] * len(differentiable)
            by_weight, by_input = (
                tape.gradient(outputs, [weights, differentiable], output_gradients) if outputs else none
            )
            if not compiled:
                whole = once_after_loops(tf.compat.v1.get_default_graph(), [*by_weight, *by_input])
                by_weight, by_input = whole[: len(by_weight)], whole[len(by_weight) :]
            halves["reached"] = [gradient is not None for gradient in by_input]
            return by_weight, [tf.convert_to_tensor(gradient) for gradient in by_input if gradient is not None]

        gradients = specs(outputs)
        with traced_for_xla() if compiled else nullcontext():
            nested = tf.function(differentiate, autograph=False).get_concrete_function(gradients)
        left_out = changed()
        read_again = {n: weight for n, weight in enumerate(weights) if n not in left_out}
        captures = _Captures(nested, read_again, {n: state[n] for n in stays()}, stacked or compiled)
        halves.update(nested=nested, captures=captures, gradients=gradients)
        return aux, handed(captures.residuals)

    traced_forward = tf.function(forward, autograph=False).get_concrete_function(
        weights, state, differentiable, constants
    )
    nested, captures = halves["nested"], halves["captures"]

    def backward(
        weights: list[tf.Tensor],
        residuals: list[tf.Tensor],
        fixed: list[tf.Tensor],
        output_gradients: list[tf.Tensor],
    ) -> Any:
        values, shapes = captures.fill_in(weights, residuals, fixed)
        result = operations(nested, [*output_gradients, *values], shapes)
        made_when_needed(captures.remade)
        return result

    residuals, fixed = specs(captures.residuals), [state[n] for n in captures.fixed]
    traced_backward = tf.function(backward, autograph=False).get_concrete_function(
        weights, residuals, fixed, halves["gradients"]
    )
    traced_backward.graph.nested = nested  # its loops' functions are no longer known to TensorFlow once it is gone
    return SplitFunction(
        forward=traced_forward,
        backward=traced_backward,
        outputs=halves["gradients"],
        residuals=captures.residuals,
        reached=halves["reached"],
        fixed=[*captures.fixed],
    )


def symbolic_gradients(halves: SplitFunction) -> list[Any]:
    """The weights' gradients in the backward's graph."""
    by_weight, _ = packer(halves.backward.structured_outputs)(iter(halves.backward.outputs))
    return list(by_weight)


def specs(values: Sequence[Any]) -> list[Any]:
    """Shapes and types of tensors or variables; None stays None."""
    return [None if value is None else tf.TensorSpec(value.shape, value.dtype) for value in values]


def size_bytes(spec: tf.TensorSpec) -> int:
    """Bytes of a tensor like this."""
    return math.prod(spec.shape.as_list()) * spec.dtype.size


_BODIES = {"While": "body", "StatelessWhile": "body", "PartitionedCall": "f", "StatefulPartitionedCall": "f"}


class _ListOf(NamedTuple):
    """What the tensors of a list are: their type, and their shape as TensorFlow's operations on lists take it."""

    dtype: tf.DType
    shape: list[int] | int  # with -1 for a size that is not known, and in place of a shape

    @classmethod
    def of(cls, tensor: tf.Tensor) -> _ListOf | None:
        """What is in a list that a loop has made, None for any other tensor."""
        while tensor.dtype == tf.variant and tensor.op.type in ("While", "StatelessWhile", "Identity"):
            tensor = tensor.op.inputs[tensor.value_index]
        if tensor.op.type not in ("EmptyTensorList", "TensorListReserve", "TensorListFromTensor"):
            return None
        given = tensor.op.inputs[tensor.op.type == "TensorListFromTensor"]
        sizes = tf.get_static_value(given, partial=True)
        if sizes is None or np.ndim(sizes) == 0:
            return cls(tensor.op.get_attr("element_dtype"), -1)
        return cls(tensor.op.get_attr("element_dtype"), [-1 if size is None else int(size) for size in sizes])

    def stacked(self, tensors: tf.Tensor) -> tf.Tensor:
        """The list as one tensor."""
        shape = tf.constant(self.shape, tf.int32)
        return tf.raw_ops.TensorListStack(input_handle=tensors, element_shape=shape, element_dtype=self.dtype)

    def unstacked(self, tensor: tf.Tensor) -> tf.Tensor:
        """The list of which this is one tensor."""
        return tf.raw_ops.TensorListFromTensor(tensor=tensor, element_shape=tf.constant(self.shape, tf.int32))


class _Captures:
    """What the nested backward captured, grouped by where the backward gets it from.

    ``fixed`` are those of the state tensors that ``stay``, by number, which the backward reads; ``remade`` what the
    last ``fill_in`` has computed again.
    """

    def __init__(
        self, nested: Any, weights: Mapping[int, tf.Tensor], stay: Mapping[int, tf.Tensor], stacked: bool
    ) -> None:
        self._captured, self._weights = [_origin(tensor) for tensor in nested.captured_inputs], weights
        self._outer = [tensor for tensor in self._captured if not tf.is_symbolic_tensor(tensor)]
        known = {tensor.ref() for tensor in (*weights.values(), *stay.values(), *self._outer)}
        pairs = list(zip(self._captured, nested.graph.internal_captures, strict=True))
        read = {outer.ref(): outer for outer, inner in pairs if outer.ref() in known or not _only_shape(inner, nested)}
        from_weights = _operations_from([*weights.values(), *stay.values()])
        self._derived = [
            tensor
            for ref, tensor in read.items()
            if ref not in known and (tensor.op.name in from_weights or _is_pool_of(tensor, read))
        ]
        _, used = _between({*known, *read} - {tensor.ref() for tensor in self._derived}, self._derived)
        self.fixed = {n: tensor for n, tensor in stay.items() if tensor.ref() in read or tensor.ref() in used}
        known.update(tensor.ref() for tensor in self._derived)
        self._saved = [tensor for ref, tensor in read.items() if ref not in known]
        shapes = [(outer, op) for outer, inner in pairs if outer.ref() not in read for op in inner.consumers()]
        self._shape_reads = [op.outputs[0] for _, op in shapes]
        self._lists = {n: each for n, tensor in enumerate(self._saved) if stacked and (each := _ListOf.of(tensor))}
        saved = [self._lists[n].stacked(each) if n in self._lists else each for n, each in enumerate(self._saved)]
        # not int32: on a GPU such tensors live on the host, which functions do not return well
        self.remade: list[tf.Tensor] = []
        self.residuals = [*saved, *(tf.shape(outer, tf.int64) for outer, _ in shapes)]

    def fill_in(
        self, weights: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor | None], dict[str, tf.Tensor]]:
        """The captures' values in order, from backward's weights, forward's residuals and state that stays.

        A capture of which only the shape is read is None; shapes are given by the names of the tensors that hold them.
        """
        handed, shapes = residuals[: len(self._saved)], residuals[len(self._saved) :]
        saved = [self._lists[n].unstacked(each) if n in self._lists else each for n, each in enumerate(handed)]
        known = [*self._weights.values(), *self.fixed.values(), *self._saved]
        given = zip(known, [*(weights[n] for n in self._weights), *fixed, *saved], strict=True)
        values = {old.ref(): new for old, new in given}
        graph = tf.compat.v1.get_default_graph()
        self.remade = []
        values.update((tensor.ref(), graph.capture(tensor)) for tensor in self._outer)
        if self._derived:
            self.remade = self._recompute(values)
            values.update(zip([tensor.ref() for tensor in self._derived], self.remade, strict=True))
        filled = [values.get(tensor.ref()) for tensor in self._captured]
        reads = zip(self._shape_reads, shapes, strict=True)
        return filled, {read.name: tf.cast(shape, read.dtype) for read, shape in reads}

    def _recompute(self, values: dict[Any, tf.Tensor]) -> list[tf.Tensor]:
        whole = self._derived[0].graph.as_graph_def()
        names, used = _between(values, self._derived)
        part = tf.compat.v1.GraphDef(versions=whole.versions, library=whole.library)
        part.node.extend(node for node in whole.node if node.name in names)
        for node in part.node:  # what they were only ordered after is not here
            node.input[:] = [name for name in node.input if not name.startswith("^")]
        given = {ref.deref().name: values[ref] for ref in used}
        return list(tf.graph_util.import_graph_def(part, given, return_elements=[t.name for t in self._derived]))


def _only_shape(inner: tf.Tensor, nested: Any) -> bool:
    """Whether a function reads nothing but the shape of a tensor that it captured."""
    types = {op.type for op in inner.consumers()}
    return types == {"Shape"} and all(inner is not output for output in nested.graph.outputs)


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """The origin of a tensor that a loop or a function passes on unchanged, so that weights are recognized there."""
    while tf.is_symbolic_tensor(tensor) and tensor.op.type in _BODIES:
        body = body_of(tensor.graph, tensor.op.get_attr(_BODIES[tensor.op.type]).name)
        returned = _origin(body.outputs[tensor.value_index])
        while returned.op.type == "Identity":
            returned = _origin(returned.op.inputs[0])
        places = [place for place, given in enumerate(body.inputs) if given is returned]
        if not places or ("While" in tensor.op.type and places != [tensor.value_index]):
            break
        tensor = tensor.op.inputs[places[0]]
    return tensor


def _is_pool_of(tensor: tf.Tensor, known: dict[Any, tf.Tensor]) -> bool:
    """Whether this is the maximum pooling of a tensor that backward has anyway.

    On a CPU the gradient of a pooling is thirty times faster where the pooling itself is in the same function.
    """
    return tensor.op.type in ("MaxPool", "MaxPool3D") and tensor.op.inputs[0].ref() in known


def _between(given: Collection[Any], tensors: Sequence[tf.Tensor]) -> tuple[set[str], set[Any]]:
    """Names of the operations that lead from the given tensors to these, and which of the given are used."""
    names: set[str] = set()
    used: set[Any] = set()
    waiting = list(tensors)
    while waiting:
        tensor = waiting.pop()
        if tensor.ref() in given:
            used.add(tensor.ref())
        elif tensor.op.name not in names:
            names.add(tensor.op.name)
            waiting += tensor.op.inputs
    return names, used


def _operations_from(weights: Sequence[tf.Tensor]) -> set[str]:
    """Names of the graph's operations that depend on these weights and constants alone."""
    if not weights:
        return set()
    names = {weight.op.name for weight in weights}
    for operation in weights[0].graph.get_operations():  # in creation order, so inputs come before their users
        pure = operation.type != "Placeholder" and not operation.op_def.is_stateful
        if pure and all(tensor.op.name in names for tensor in operation.inputs):
            names.add(operation.name)
    return names
