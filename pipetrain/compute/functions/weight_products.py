"""Weight gradients that are products over rows, made once for all microbatches of a minibatch.

The weight gradient of a dense layer with inputs ``x`` of shape (rows, in) and gradients ``g`` of its outputs, of shape
(rows, out), is ``x^T g`` of shape (in, out). The sum of several microbatches' products is the product of all their rows
together, ``[x1; x2]^T [g1; g2]``. A sum reads and writes a gradient for every microbatch; of products only the factors
are kept, until the gradient is made and used by the update at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import origin


class Product(NamedTuple):
    """The factors of a weight's gradient: inputs of shape (rows, in), and gradients of outputs of shape (rows, out)."""

    inputs: Any
    gradients: Any

    @classmethod
    def of(cls, gradient: tf.Tensor) -> Product:
        """Those of a gradient in a graph that is a product over rows."""
        return cls(*origin(gradient).inputs)

    def joined(self, other: Product) -> Product:
        """The factors of the sum of two products: the rows of both."""
        return Product(*(tf.concat(pair, 0) for pair in zip(self, other, strict=True)))

    def made(self) -> tf.Tensor:
        """The gradient."""
        return tf.matmul(self.inputs, self.gradients, transpose_a=True)


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
    return {n for n, factors in found.items() if factors is not None and factors.inputs.shape[0] is None}


def made(gradients: Sequence[Any]) -> list[Any]:
    """The gradients with their products made, the last layer's first, as a backward makes them."""
    last_first = [each.made() if isinstance(each, Product) else each for each in reversed(gradients)]
    return last_first[::-1]


def _factors(gradient: Any) -> Product | None:
    """Those of a gradient that is a product over rows."""
    if not isinstance(gradient, tf.Tensor):
        return None
    operation = origin(gradient)
    if operation.type != "MatMul" or not operation.get_attr("transpose_a") or operation.get_attr("transpose_b"):
        return None
    return Product(*operation.inputs)


def _are_fewer_bytes(factors: Product, times: float) -> bool:
    """Whether factors with so many times the rows are fewer bytes than their product."""
    (rows, inputs), (_, outputs) = factors.inputs.shape, factors.gradients.shape
    if None in (rows, inputs, outputs):
        return False
    return bool(times * rows * (inputs + outputs) < inputs * outputs)
