"""Weight gradients that are products over rows, made once for all microbatches, or for all turns of a loop.

The weight gradient of a dense layer with inputs ``x`` of shape (rows, in) and gradients ``g`` of its outputs, of shape
(rows, out), is ``x^T g`` of shape (in, out). The sum of several microbatches' products is the product of all their rows
together, ``[x1; x2]^T [g1; g2]``. A sum reads and writes a gradient for every microbatch; of products only the factors
are kept, each microbatch's as they are, until they are joined and the gradient is made and used by the update at once.

In the gradient of a recurrent layer every turn ``t`` adds ``x[t]^T g[t]``, of shape (in, out), to a sum: for few rows
it reads and writes more of sums than of anything else. The sum over the turns is the product of their rows together,
``[x[1]; x[2]; ...]^T [g[1]; g[2]; ...]``. The loop keeps the factors, and the gradient is one product after it, which
may wait, or be made for several microbatches at once, as that of a dense layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import origin, some_of
from pipetrain.compute.tensorflow_private import body_of, read_instead


class WeightProduct(NamedTuple):
    """The factors of a weight's gradient, a tensor of each for every microbatch that has been summed.

    ``inputs`` are of shape (rows, in), ``gradients``, of the outputs, of shape (rows, out).
    """

    inputs: tuple[Any, ...]
    gradients: tuple[Any, ...]

    @classmethod
    def of(cls, gradient: tf.Tensor) -> WeightProduct:
        """Those of a gradient in a graph that is a product over rows."""
        inputs, gradients = origin(gradient).inputs
        return cls((inputs,), (gradients,))

    def joined(self, other: WeightProduct) -> WeightProduct:
        """The factors of the sum of two products: those of both."""
        return WeightProduct(self.inputs + other.inputs, self.gradients + other.gradients)

    def times(self, microbatches: int) -> WeightProduct:
        """As many of these, for the specs of a sum."""
        return WeightProduct(microbatches * self.inputs, microbatches * self.gradients)

    def made(self) -> tf.Tensor:
        """The gradient."""
        return tf.matmul(_rows_of(self.inputs), _rows_of(self.gradients), transpose_a=True)


def products(gradients: Sequence[Any], rows: int, minibatch_rows: int) -> set[int]:
    """Which of these gradients in a graph are products over rows, of which the factors are fewer bytes than a gradient.

    ``rows`` are the examples that the graph is for, which must be known, ``minibatch_rows`` those of all microbatches
    of a minibatch: a matrix that has several rows for an example has as many times more of them.
    """
    return {
        n
        for n, each in enumerate(gradients)
        if (factors := _factors(each)) is not None and _are_fewer_bytes(factors, minibatch_rows / rows)
    }


def over_any_rows(gradients: Sequence[Any]) -> set[int]:
    """Which of these gradients in a graph for any number of rows are products over rows."""
    found = {n: _factors(each) for n, each in enumerate(gradients)}
    return {n for n, factors in found.items() if factors is not None and factors[0].shape[0] is None}


def made(gradients: Sequence[Any]) -> list[Any]:
    """The gradients with their products made, the last layer's first, as a backward makes them."""
    last_first = [each.made() if isinstance(each, WeightProduct) else each for each in reversed(gradients)]
    return last_first[::-1]


def counted(gradients: Sequence[Any]) -> int:
    """How many microbatches' factors the products among these gradients have, 1 if there are none."""
    return next((len(each.inputs) for each in gradients if isinstance(each, WeightProduct)), 1)


def of_parts(like: Sequence[Any], microbatches: int) -> list[Any]:
    """The specs of gradients summed over so many microbatches, from those of one."""
    return [each.times(microbatches) if isinstance(each, WeightProduct) else each for each in like]


def _rows_of(factors: tuple[Any, ...]) -> Any:
    return factors[0] if len(factors) == 1 else tf.concat(factors, 0)


def _factors(gradient: Any) -> tuple[Any, Any] | None:
    """Those of a gradient that is a product over rows."""
    if not isinstance(gradient, tf.Tensor):
        return None
    operation = origin(gradient)
    if operation.type != "MatMul" or not operation.get_attr("transpose_a") or operation.get_attr("transpose_b"):
        return None
    inputs, gradients = operation.inputs
    return inputs, gradients


def _are_fewer_bytes(factors: tuple[Any, Any], times: float) -> bool:
    """Whether factors with so many times the rows are fewer bytes than their product."""
    (rows, inputs), (_, outputs) = (factor.shape for factor in factors)
    if None in (rows, inputs, outputs):
        return False
    return bool(times * rows * (inputs + outputs) < inputs * outputs)


SUMS = ("AddN", "AddV2")


class _Sum(NamedTuple):
    """The sum of products that is a loop's variable of this number, and the tensors in its body: their factors.

    ``only_for_it`` are the names of the body's operations that nothing else needs.
    """

    number: int
    inputs: tf.Tensor
    gradients: tf.Tensor
    only_for_it: frozenset[str]


def once_after_loops(graph: tf.Graph, tensors: Sequence[Any]) -> list[Any]:
    """The same tensors, after all loops of the graph were replaced by such as sum no products.

    Loops that XLA is to compile are left as they are: it wants to know the number of turns.
    """
    replaced: dict[Any, tf.Tensor] = {}
    for loop in graph.get_operations():
        if loop.type == "StatelessWhile":
            replaced.update(_replaced(graph, loop))
    return [replaced.get(each.ref(), each) if isinstance(each, tf.Tensor) else each for each in tensors]


def _replaced(graph: tf.Graph, loop: tf.Operation) -> dict[Any, tf.Tensor]:
    """What replaces the outputs of a loop; nothing if it sums no products."""
    body, condition = (body_of(graph, loop.get_attr(name).name) for name in ("body", "cond"))
    sums = [each for each in _sums(body) if _is_zero(loop.inputs[each.number])]
    if not sums:
        return {}
    gone = {each.number for each in sums}
    left = [n for n in range(len(loop.inputs)) if n not in gone]
    without = frozenset().union(*(each.only_for_it for each in sums))
    factors = [factor for each in sums for factor in (each.inputs, each.gradients)]

    def whole(values: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        by_number = dict(zip(left, values, strict=False))
        return [by_number.get(n) for n in range(len(loop.inputs))]

    def goes_on(*values: tf.Tensor) -> tf.Tensor:
        return some_of(SimpleNamespace(graph=condition), condition.outputs, (), whole(values), {})[0]

    def turn(*values: tf.Tensor) -> list[tf.Tensor]:
        wanted = [*(body.outputs[n] for n in left), *factors]
        made = some_of(SimpleNamespace(graph=body), wanted, without, whole(values), {})
        for n, value in zip(left, made, strict=False):
            value.set_shape(body.inputs[n].shape)
        lists = zip(values[len(left) :], made[len(left) :], strict=True)
        return [*made[: len(left)], *(tf.raw_ops.TensorListPushBack(input_handle=a, tensor=b) for a, b in lists)]

    with tf.control_dependencies(None):
        empty = [_empty(each) for each in factors]
    given = [*(loop.inputs[n] for n in left), *empty]
    shapes = [*(body.inputs[n].shape for n in left), *(tf.TensorShape([]) for _ in empty)]
    made = tf.while_loop(goes_on, turn, given, shape_invariants=shapes)
    stacked = [_rows(each, like) for each, like in zip(made[len(left) :], factors, strict=True)]
    new = dict(zip(left, made, strict=False))
    for each, inputs, gradients in zip(sums, stacked[::2], stacked[1::2], strict=True):
        new[each.number] = tf.matmul(inputs, gradients, transpose_a=True)
    for n, output in enumerate(loop.outputs):
        read_instead(output, new[n])
    return {output.ref(): new[n] for n, output in enumerate(loop.outputs)}


def _sums(body: Any) -> Iterator[_Sum]:
    """The variables to which a turn of a loop adds a product over rows and of which it reads nothing."""
    returned = [each.ref() for each in body.outputs]
    for number, (given, output) in enumerate(zip(body.inputs, body.outputs, strict=True)):
        way = [*_copies(output)]
        terms = [[*_copies(each)] for each in way[-1].op.inputs] if way[-1].op.type in SUMS else []
        if len(terms) != 2 or (terms[0][-1] is given) == (terms[1][-1] is given):
            continue
        product = terms[terms[0][-1] is given][-1]
        tensors = [*way, *terms[0], *terms[1]]
        names = frozenset(each.op.name for each in tensors if each is not given)
        read = {each.name for tensor in tensors for each in tensor.consumers()}
        alone = read <= names and sum(each.ref() in returned for each in tensors) == 1
        if alone and _is_product(product.op):
            inputs, gradients = product.op.inputs
            yield _Sum(number, inputs, gradients, names)


def _copies(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """A tensor, and those of which it is a copy."""
    yield tensor
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
        yield tensor


def _is_product(operation: tf.Operation) -> bool:
    if operation.type != "MatMul" or not operation.get_attr("transpose_a") or operation.get_attr("transpose_b"):
        return False
    return all(factor.shape.rank == 2 and factor.shape[1] is not None for factor in operation.inputs)


def _is_zero(tensor: tf.Tensor) -> bool:
    """Whether a loop's variable begins with zeros."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return not value.any()
    return tensor.op.type == "ZerosLike" or (tensor.op.type == "Fill" and not tf.get_static_value(tensor.op.inputs[1]))


def _empty(like: tf.Tensor) -> tf.Tensor:
    """A list without tensors, for such as this one."""
    shape = tf.constant([-1, like.shape[1]], tf.int32)
    return tf.raw_ops.EmptyTensorList(element_shape=shape, max_num_elements=-1, element_dtype=like.dtype)


def _rows(tensors: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """The rows of all tensors in a list."""
    shape = tf.constant([-1, like.shape[1]], tf.int32)
    return tf.raw_ops.TensorListConcatV2(
        input_handle=tensors, element_shape=shape, leading_dims=tf.zeros([0], tf.int64), element_dtype=like.dtype
    )[0]
