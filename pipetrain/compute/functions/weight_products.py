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


def products(gradients: Sequence[Any], rows: int) -> set[int]:
    """Which of these gradients in a graph are products over rows, of which the factors are fewer bytes than a gradient.

    ``rows`` are the examples of all microbatches of a minibatch.
    """
    return {n for n, each in enumerate(gradients) if isinstance(each, tf.Tensor) and _is_product(each, rows)}


def made(gradients: Sequence[Any]) -> list[Any]:
    """The gradients with their products made, the last layer's first, as a backward makes them."""
    last_first = [each.made() if isinstance(each, Product) else each for each in reversed(gradients)]
    return last_first[::-1]


def _is_product(gradient: tf.Tensor, rows: int) -> bool:
    operation = origin(gradient)
    if operation.type != "MatMul" or not operation.get_attr("transpose_a") or operation.get_attr("transpose_b"):
        return False
    inputs, gradients = operation.inputs
    per_example = _rows_per_example(gradients)
    if per_example is None or None in (inputs.shape[1], gradients.shape[1]):
        return False
    multiplied = rows * per_example
    if inputs.shape[0] not in (None, multiplied):
        return False  # whose rows are not the examples
    return bool(multiplied * (inputs.shape[1] + gradients.shape[1]) < inputs.shape[1] * gradients.shape[1])


def _rows_per_example(matrix: tf.Tensor) -> float | None:
    """How many rows a matrix has for every example: several if it was a tensor of more dimensions; None if unknown."""
    operation = origin(matrix)
    if operation.type != "Reshape":
        return 1.0
    of_example = operation.inputs[0].shape[1:]
    if not of_example.is_fully_defined() or matrix.shape[1] is None:
        return None
    return float(of_example.num_elements() / matrix.shape[1])
