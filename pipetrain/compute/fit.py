"""Learns, while training, which multiple of the velocity comes nearest to where weights go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.bound import direct
from pipetrain.plan import prediction


class Fit:
    """Observes, one time after another, how far weights go in ``horizon`` updates, against the velocity at the start.

    See ``prediction.ratio``. Between two observations it holds the weights and the velocity of one version: two copies.
    ``sums`` are what training has to remember.

    Args:
        variables: the weights.
        velocity: reads the velocity of each.
        horizon: updates ahead.
    """

    def __init__(
        self, variables: Sequence[keras.Variable], velocity: Callable[[], list[tf.Tensor]], horizon: int
    ) -> None:
        self._variables, self._velocity, self._horizon = variables, velocity, horizon
        self.sums = tf.Variable(tf.zeros([2]), trainable=False)
        self._begin = direct(tf.function(self._now, autograph=False).get_concrete_function())
        specs = [tf.TensorSpec(each.shape, each.dtype) for each in variables]
        observe = tf.function(self._observed, autograph=False)
        self._observe = direct(observe.get_concrete_function(specs, specs))
        self.rest()

    def rest(self) -> None:
        """Training begins, or goes on after a drain: an observation under way is given up."""
        self._begun: tuple[Any, Any] | None = None
        self._updates = 0

    def updated(self) -> None:
        """To be called after every update."""
        self._updates += 1
        if self._begun is not None and self._updates == self._horizon:
            self._observe(*self._begun)
            self._begun = None
        if self._begun is None:
            self._begun, self._updates = self._begin(), 0

    def ratio(self) -> tf.Tensor:
        """The multiple so far."""
        return prediction.ratio(*tf.unstack(self.sums.read_value()))

    def _now(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        return [variable.value.read_value() for variable in self._variables], self._velocity()

    def _observed(self, weights: list[tf.Tensor], velocity: list[tf.Tensor]) -> None:
        pairs = zip(self._variables, weights, strict=True)
        gone = [tf.cast(variable.value - old, tf.float32) for variable, old in pairs]
        by = [tf.cast(each, tf.float32) for each in velocity]
        along = tf.add_n([tf.reduce_sum(a * b) for a, b in zip(gone, by, strict=True)])
        square = tf.add_n([tf.reduce_sum(each * each) for each in by])
        self.sums.assign(tf.stack(prediction.observed(tf.unstack(self.sums), along, square, self._horizon)))
