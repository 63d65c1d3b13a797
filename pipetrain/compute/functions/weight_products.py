"""Weight gradients that are products over rows, made once for all microbatches of a minibatch.

The weight gradient of a dense layer with inputs ``x`` of shape (rows, in) and gradients ``g`` of its outputs, of shape
(rows, out), is ``x^T g`` of shape (in, out). The sum of several microbatches' products is the product of all their rows
together, ``[x1; x2]^T [g1; g2]``. A sum reads and writes a gradient for every microbatch; of products only the factors
are kept, each microbatch's as they are, until they are joined and the gradient is made and used by the update at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import origin


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
