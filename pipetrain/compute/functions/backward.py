"""A stage's backward, alone or in one call with the forward before it and the sum and update after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import (
    inlined,
    inputs_of,
    only_for,
    packer,
    some_of,
    updated_one_by_one,
    updated_when_read,
)
from pipetrain.compute.functions.split import SplitFunction, specs, symbolic_gradients
from pipetrain.compute.functions.stage_values import SEPARATE, Packing
from pipetrain.compute.functions.update_step import UpdateStep
from pipetrain.compute.functions.weight_binding import BoundFunction, Weights
from pipetrain.compute.functions.weight_products import WeightProduct, counted, made, of_parts, over_any_rows

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


Gradients = list[Any]


class BackwardAdditions(NamedTuple):
    """What one call does in addition to the backward: the forward before it, a sum with other gradients, an update.

    ``late``: if above 0, of so many microbatches' backwards it does only the weights' gradients, from what
    ``input_gradients`` has left; those that are products over rows are made once for all of them.
    """

    runs: bool
    adds: bool
    updates: bool
    late: int = 0


class Results(NamedTuple):
    """What one call gives.

    ``ran`` are the results of a forward in the call other than residuals, ``ran_at_s`` the time of day when it was
    finished; a weight's gradient is None if the call used it for an update, and may be a ``WeightProduct``.
    """

    ran: Any
    ran_at_s: tf.Tensor | None
    gradients: Gradients
    by_input: list[tf.Tensor]


class Backward:
    """The backward of one microbatch, in one call with its forward, sum and update where possible.

    Each combination is traced when it is first needed. Separate calls would cost as much as a small stage's computing.
    In one call gradients are used while they are in the processor's caches, and residuals need not be returned from one
    call and passed to the next. ``like`` are the specs of the weights' gradients that it gives and adds.

    Args:
        halves: forward and backward.
        bound: binds a function to the stage's variables.
        step: how the stage's own weights are updated.
        timed: whether to return the time when a forward in the call was finished.
        packing: how residuals come from a forward.
        once: the numbers of the weights whose gradients are made once for all microbatches, see ``weight_products``.
    """

    def __init__(
        self,
        halves: SplitFunction,
        bound: Callable[[Any], BoundFunction],
        step: UpdateStep,
        timed: bool,
        packing: Packing,
        once: Collection[int] = (),
    ) -> None:
        self._halves, self._bound, self._step, self._timed, self._packing = halves, bound, step, timed, packing
        self._calls: dict[tuple[BackwardAdditions, int], BoundFunction] = {}
        self._once, symbolic = once, symbolic_gradients(halves)
        like = halves.backward.structured_outputs[0]
        self.like = [_specs(WeightProduct.of(symbolic[n])) if n in self._once else each for n, each in enumerate(like)]
        self._sums = [None if isinstance(each, WeightProduct) else each for each in self.like]
        self._parts: BackwardHalves | None = None  # made when one is needed
        self._input_gradients: dict[bool, BoundFunction] = {}  # by whether they run the forward
        self._begun, self._ran = 0, tf.Variable(tf.zeros([], tf.int64), trainable=False)  # calls with a forward

    def __call__(
        self,
        additions: BackwardAdditions,
        weights: Weights,
        given: Any,
        fixed: Sequence[tf.Tensor],
        output_gradients: Sequence[Any],
        numbers: Any,
        total: Gradients | None,
    ) -> Results:
        """One call. ``given`` are packed residuals, all that the forward takes beside weights, or packs of operands.

        ``fixed`` is the state that stays, see ``split``; none where ``given`` has all state, and with operands.
        """
        key, kept = (additions, 0), total
        if total is not None and additions.updates:
            key = additions, counted(total)
        elif total is not None:  # factors only wait: they need not go through the call
            total = [None if isinstance(each, WeightProduct) else each for each in total]
        if key not in self._calls:
            self._calls[key] = self._bound(self._traced(*key))
        self._begun += additions.runs
        results: Results = self._calls[key](weights, given, fixed, output_gradients, numbers, total)
        if kept is None or additions.updates:
            return results
        pairs = zip(kept, results.gradients, strict=True)
        return results._replace(gradients=[a.joined(b) if isinstance(a, WeightProduct) else b for a, b in pairs])

    def input_gradients(
        self, runs: bool, weights: Weights, given: Any, fixed: Sequence[tf.Tensor], output_gradients: Sequence[Any]
    ) -> Results:
        """The first half of the backward, after the forward if it ``runs``; ``given`` and ``fixed`` as in a call.

        In place of the weights' gradients it gives the packed operands of a late call.
        """
        if runs not in self._input_gradients:
            self._input_gradients[runs] = self._bound(self._traced_first(runs))
        self._begun += runs
        results: Results = self._input_gradients[runs](weights, given, fixed, output_gradients)
        return results

    def _traced_first(self, runs: bool) -> Any:
        """The first half."""
        weights, residuals, fixed, output_gradients = self._halves.backward.structured_input_signature[0]
        given = self._halves.forward.structured_input_signature[0][1:] if runs else self._packing.specs(residuals)
        cut = self._cut

        def call(weights: Any, given: Any, fixed: Any, output_gradients: Any) -> Results:
            ran = ran_at_s = None
            if runs:
                ran, ran_at_s, given, fixed, output_gradients = self._after_forward(weights, given, output_gradients)
            unpacked = self._packing.unpack(given, residuals)
            by_input, operands = cut.input_gradients(weights, unpacked, fixed, output_gradients)
            return Results(ran, ran_at_s, operands, by_input)

        traced = tf.function(call, autograph=False)
        return traced.get_concrete_function(weights, given, [] if runs else fixed, output_gradients)

    def _after_forward(self, weights: Any, given: Any, output_gradients: Sequence[tf.Tensor]) -> tuple[Any, ...]:
        """Run the forward; its results, when it was finished, its residuals, and the backward's other arguments."""
        fixed = [given[0][n] for n in self._halves.fixed]
        ran, residuals = inlined(self._halves.forward, weights, *given)
        with tf.control_dependencies(_there(ran)):
            counted = self._ran.assign_add(1).op
            ran_at_s = tf.timestamp() if self._timed else None
        before = [counted] if ran_at_s is None else [counted, ran_at_s.op]  # else the time could be noted much later
        with tf.control_dependencies(before):
            return ran, ran_at_s, residuals, fixed, [tf.identity(start) for start in output_gradients]

    @property
    def _cut(self) -> BackwardHalves:
        if self._parts is None:
            self._parts = BackwardHalves(self._halves.backward, self._packing)
        return self._parts

    def had_run(self) -> bool:
        """Whether a call that failed had finished its forward."""
        before = self._begun - 1
        self._begun = self.runs()
        return self._begun > before

    def runs(self) -> int:
        """How many forwards calls have finished so far, all told."""
        return int(self._ran.numpy())

    def _traced(self, additions: BackwardAdditions, microbatches: int) -> Any:
        """The call; an update with a total has the factors of so many microbatches there."""
        forward, backward = self._halves.forward, self._halves.backward
        weights, residuals, fixed, output_gradients = backward.structured_input_signature[0]
        fixed = [] if additions.runs or additions.late else fixed
        given = forward.structured_input_signature[0][1:] if additions.runs else self._packing.specs(residuals)
        if additions.late:
            given, output_gradients = additions.late * [self._cut.packing.specs(self._cut.operands)], []

        def call(
            weights: Any, given: Any, fixed: Any, output_gradients: Any, numbers: Any, total: Gradients | None
        ) -> Results:
            ran = ran_at_s = None
            if additions.runs:
                ran, ran_at_s, given, fixed, output_gradients = self._after_forward(weights, given, output_gradients)
            if additions.late:
                gradients, by_input = self._made_late(weights, given), []
            else:
                unpacked = self._packing.unpack(given, residuals)
                gradients, by_input = inlined(backward, weights, unpacked, fixed, output_gradients)
                gradients = [WeightProduct.of(each) if n in self._once else each for n, each in enumerate(gradients)]
            if total is not None:
                pairs = zip(total, gradients, self.like, strict=True)
                gradients = [b if a is None else _add(a, b, like) for a, b, like in pairs]
            if additions.updates:
                gradients = made(gradients)
                numbers_of_own, handles = self._step.own.numbers, self._step.handles
                own = [gradients[n] for n in numbers_of_own]
                with tf.control_dependencies(_there(ran)):
                    self._step.apply(own, None, numbers)
                updated_when_read([weights[n] for n in numbers_of_own], handles)
                updated_one_by_one(own, handles)
                gradients = [None if n in numbers_of_own else each for n, each in enumerate(gradients)]
            return Results(ran, ran_at_s, gradients, by_input)

        total = of_parts(self.like, microbatches) if additions.updates else self._sums
        others = self._step.numbers if additions.updates else None, total if additions.adds else None
        return tf.function(call, autograph=False).get_concrete_function(
            weights, given, fixed, output_gradients, *others
        )

    def _made_late(self, weights: Any, given: Sequence[Any]) -> Gradients:
        """The sums of the weights' gradients of several microbatches, of which operands are given."""
        total: Gradients | None = None
        for packed in given:
            gradients = self._cut.weight_gradients(weights, packed)
            joined = over_any_rows(gradients)
            gradients = [
                WeightProduct.of(gradient) if n in joined else gradient for n, gradient in enumerate(gradients)
            ]
            total = gradients if total is None else added(total, gradients, self.like)
        return made(total or [])


def _specs(product: WeightProduct) -> WeightProduct:
    return WeightProduct(*(tuple(specs(factors)) for factors in product))


def _there(values: Any) -> list[tf.Tensor]:
    """All tensors, for what may happen only when they are there: copies, of which TensorFlow makes none.

    Calls are inlined, and what waits for a call itself then waits for its side effects alone.
    """
    present = [each for each in tf.nest.flatten(values, expand_composites=True) if each is not None]
    return [tf.identity(each) for each in present]


def added(total: Gradients, gradients: Gradients, like: Gradients) -> Gradients:
    """The sums of two lists of gradients, whose form is that of the traced gradients ``like``."""
    return [_add(*each) for each in zip(total, gradients, like, strict=True)]


def over_stages(a: Any, b: Any) -> Any:
    """The sum of the gradients of one weight that two stages have, as a tape over both would add them."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, tf.IndexedSlices) and isinstance(b, tf.IndexedSlices):
        return _concatenated(a, b)
    return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)


def _add(a: Any, b: Any, like: Any) -> Any:
    """The sum of two gradients of one weight: both None, tensors, products, or rows of an embedding.

    Rows of embeddings are concatenated, as a whole minibatch would give them, unless their number does not depend on
    the number of examples. In that case the rows are the same (such as positions) and are summed, because some
    optimizers square them.
    """
    if a is None:
        return None
    if isinstance(a, WeightProduct):
        return a.joined(b)
    if isinstance(a, tf.IndexedSlices):
        if like.values.shape[0] is not None:
            return tf.IndexedSlices(a.values + b.values, a.indices, a.dense_shape)
        return _concatenated(a, b)
    return a + b


def _concatenated(a: tf.IndexedSlices, b: tf.IndexedSlices) -> tf.IndexedSlices:
    values, indices = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
    return tf.IndexedSlices(values, indices, a.dense_shape)
