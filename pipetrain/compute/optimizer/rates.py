"""A learning rate that is smaller where gradients are stale."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from pipetrain.schemes.staleness_corrections import rescaled


class Rescaled(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate rescaled by the ``staleness``; see ``schemes.staleness_corrections.rescaled``.

    Args:
        rate: what Keras' optimizers take: a variable, a schedule, or a function without arguments.
        steps: over which the result approaches the rate itself.
    """

    staleness: Any = 0

    def __init__(self, rate: Any, steps: int) -> None:
        self._rate, self._steps = rate, steps

    def assign(self, rate: Any) -> None:
        """Another rate, where it is a variable."""
        self._rate.assign(rate)

    def __call__(self, step: Any) -> tf.Tensor:
        """The rate of this step."""
        rate = tf.convert_to_tensor(self._now(step), tf.float32)
        return rescaled(rate, tf.cast(self.staleness, rate.dtype), tf.cast(step, rate.dtype), float(self._steps))

    def _now(self, step: Any) -> Any:
        if isinstance(self._rate, keras.optimizers.schedules.LearningRateSchedule):
            return self._rate(step)
        return self._rate() if callable(self._rate) else self._rate.value


def is_scheduled(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the learning rate is a schedule."""
    return isinstance(optimizer.get_config()["learning_rate"], dict)
