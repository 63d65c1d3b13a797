"""A stage's backward, alone or in one call with what follows it: adding up gradients, the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.bound import BoundFunction, Weights

Gradients = list[Any]


class Backward:
    """``gradients(...)`` of one microbatch, and ``step(...)``, which also updates; both add them to a ``total``.

    One call each, traced when it is first needed. A call of its own for every part would cost as much as a small
    stage's computing, and gradients that are used at once are still in the processor's caches.

    Args:
        half: the concrete function ``(weights, residuals, output_gradients) -> (gradients, input_gradients)``.
        bound: binds such a function to the stage's variables.
        apply: ``apply(gradients, None, staleness)`` updates these.
        staleness: the spec of what ``apply`` takes as staleness, None if nothing.
    """

    def __init__(
        self,
        half: Any,
        bound: Callable[[Any], BoundFunction],
        apply: Callable[[Gradients, None, tf.Tensor | None], None],
        staleness: tf.TensorSpec | None,
    ) -> None:
        self._half, self._bound, self._apply, self._staleness = half, bound, apply, staleness
        self._calls: dict[tuple[bool, bool], BoundFunction] = {(False, False): bound(half)}

    def gradients(
        self, weights: Weights, residuals: Any, starts: Sequence[Any], total: Gradients | None
    ) -> tuple[Gradients, list[tf.Tensor]]:
        """The sum of ``total`` and the weights' gradients, and the inputs' gradients."""
        return self._call(total is not None, False)(weights, residuals, starts, total)

    def step(
        self,
        weights: Weights,
        residuals: Any,
        starts: Sequence[Any],
        total: Gradients | None,
        staleness: tf.Tensor | None,
    ) -> list[tf.Tensor]:
        """The inputs' gradients; the variables are updated by the sum of ``total`` and the weights' gradients."""
        return self._call(total is not None, True)(weights, residuals, starts, staleness, total)

    def _call(self, adds: bool, updates: bool) -> BoundFunction:
        if (adds, updates) not in self._calls:
            self._calls[adds, updates] = self._bound(self._traced(adds, updates))
        return self._calls[adds, updates]

    def _traced(self, adds: bool, updates: bool) -> Any:
        given, like = self._half.structured_input_signature[0], self._half.structured_outputs[0]
        total = like if adds else None

        def more(weights: Any, residuals: Any, starts: Any, total: Gradients | None) -> Any:
            gradients, by_input = self._half(weights, residuals, starts)
            return (gradients if total is None else added(total, gradients, like)), by_input

        def step(weights: Any, residuals: Any, starts: Any, staleness: Any, total: Gradients | None) -> Any:
            gradients, by_input = more(weights, residuals, starts, total)
            with tf.control_dependencies(_tensors([gradients, by_input])):
                self._apply(gradients, None, staleness)  # when nobody reads the weights any more: in place
            return by_input

        function, arguments = (step, (*given, self._staleness, total)) if updates else (more, (*given, total))
        return tf.function(function, autograph=False).get_concrete_function(*arguments)


def _tensors(values: Any) -> list[tf.Tensor]:
    """All tensors, without the None of weights that have no gradient."""
    return [each for each in tf.nest.flatten(values, expand_composites=True) if each is not None]


def added(total: Gradients, gradients: Gradients, like: Gradients) -> Gradients:
    """The sums of two lists of gradients, as those that were traced are ``like``."""
    return [_add(*each) for each in zip(total, gradients, like, strict=True)]


def _add(a: Any, b: Any, like: Any) -> Any:
    """The sum of two gradients of one weight: both None, both tensors, or both rows of an embedding.

    Rows are what a whole minibatch would have: more of them, unless their number does not depend on that of examples.
    Then they are the same ones (such as positions), and optimizers that square them want their sums.
    """
    if a is None:
        return None
    if isinstance(a, tf.IndexedSlices):
        if like.values.shape[0] is not None:
            return tf.IndexedSlices(a.values + b.values, a.indices, a.dense_shape)
        values, indices = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
        return tf.IndexedSlices(values, indices, a.dense_shape)
    return a + b
