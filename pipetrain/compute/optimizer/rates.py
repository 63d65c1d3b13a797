"""Learning rates of stages, made from that of the compiled optimizer."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from pipetrain.schemes.staleness_corrections import rescaled


class Scaled(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate multiplied by a factor, whatever becomes of it.

    Args:
        rate: what Keras' optimizers take: a variable, a schedule, or a function without arguments.
        factor: the factor.
    """

    def __init__(self, rate: Any, factor: float = 1.0) -> None:
        self._rate, self._factor = rate, factor

    def assign(self, rate: Any) -> None:
        """Another rate, where it is a variable."""
        self._rate.assign(rate)

    def __call__(self, step: Any) -> tf.Tensor:
        """The rate of this step."""
        return tf.convert_to_tensor(self._now(step), tf.float32) * self._factor

    def _now(self, step: Any) -> Any:
        if isinstance(self._rate, keras.optimizers.schedules.LearningRateSchedule):
            return self._rate(step)
        return self._rate() if callable(self._rate) else self._rate.value


class Rescaled(Scaled):
    """A learning rate rescaled by the ``staleness``; see ``schemes.staleness_corrections.rescaled``.

    Args:
        rate: as for ``Scaled``.
        steps: over which the result approaches the rate itself.
    """

    staleness: Any = 0

    def __init__(self, rate: Any, steps: int) -> None:
        super().__init__(rate)
        self._steps = steps

    def __call__(self, step: Any) -> tf.Tensor:
        """The rate of this step."""
        rate = super().__call__(step)
        return rescaled(rate, tf.cast(self.staleness, rate.dtype), tf.cast(step, rate.dtype), float(self._steps))


def is_scheduled(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the learning rate is a schedule."""
    return isinstance(optimizer.get_config()["learning_rate"], dict)
