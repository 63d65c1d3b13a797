"""Fits, during training, the multiple of the velocity that is nearest to the weights' displacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.functions.kernels import direct
from pipetrain.schemes import prediction


class HorizonFit:
    """Repeatedly compares the weights' displacement over ``horizon`` updates with the velocity at the start.

    See ``schemes.prediction.ratio``. During an observation it holds the weights and the velocity of one version: two
    copies. ``sums`` are the state that a checkpoint saves.

    Args:
        variables: the weights.
        velocity: reads the velocity of each.
        undecayed: the part of a variable's old value that weight decay leaves after a number of updates, and the number
            of velocities that they add (see ``schemes.prediction.decayed``).
        horizon: updates ahead.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        velocity: Callable[[], list[tf.Tensor]],
        undecayed: Callable[[keras.Variable, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
        horizon: int,
    ) -> None:
        self._variables, self._velocity, self._undecayed = variables, velocity, undecayed
        self._horizon = horizon
        self.sums = tf.Variable(tf.zeros([2]), trainable=False)
        self._begin = direct(tf.function(self._now, autograph=False).get_concrete_function())
        specs = [tf.TensorSpec(each.shape, each.dtype) for each in variables]
        observe = tf.function(self._observed, autograph=False)
        self._observe = direct(observe.get_concrete_function(specs, specs))
        self.reset()

    def reset(self) -> None:
        """Called when training begins or continues after a drain: discard the current observation."""
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
        """The fitted multiple so far."""
        return prediction.ratio(*tf.unstack(self.sums.read_value()))

    def _now(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        return [variable.value.read_value() for variable in self._variables], self._velocity()

    def _observed(self, weights: list[tf.Tensor], velocity: list[tf.Tensor]) -> None:
        horizon = tf.constant(float(self._horizon))
        along, square = [], []
        for variable, old, by in zip(self._variables, weights, velocity, strict=True):
            left, steps = self._undecayed(variable, old, horizon)
            by = tf.cast(by, tf.float32)
            along.append(tf.reduce_sum(tf.cast(variable.value - left, tf.float32) * by) / tf.cast(steps, tf.float32))
            square.append(tf.reduce_sum(by * by))
        sums = prediction.observed(tf.unstack(self.sums), tf.add_n(along), tf.add_n(square))
        self.sums.assign(tf.stack(sums))
