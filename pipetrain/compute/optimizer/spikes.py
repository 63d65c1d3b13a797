"""SGD with momentum whose steps compensate for stale gradients."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from pipetrain.compute.keras_private import index_of
from pipetrain.schemes.staleness_corrections import spike


def check_compensable(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise ValueError, with its name, for an optimizer that has no spike compensation."""
    if type(optimizer) is not keras.optimizers.SGD or optimizer.nesterov or not 0 < optimizer.momentum < 1:
        received = type(optimizer).__name__
        if type(optimizer) is keras.optimizers.SGD:
            received += f"(momentum={optimizer.momentum}, nesterov={optimizer.nesterov})"
        raise ValueError(
            f"Spike compensation is for SGD with momentum. Received: optimizer={received}. "
            "Try keras.optimizers.SGD(..., momentum=0.9), or another scheme."
        )


class SpikeCompensated(keras.optimizers.SGD):
    """``m <- mu*m - lr*g; w <- w + a*m + b*(-lr*g)``, with a and b by ``staleness``.

    See ``schemes.staleness_corrections.spike``.
    """

    staleness: Any = 0

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Keras' SGD, except for what is added to the variable."""
        mu, slot = self.momentum, self.momentums[index_of(self, variable)]
        rate = ops.cast(learning_rate, variable.dtype)
        step = ops.multiply(ops.cast(gradient, variable.dtype), rate)
        self.assign(slot, ops.subtract(ops.multiply(slot, ops.cast(mu, variable.dtype)), step))
        late, now = (ops.cast(each, variable.dtype) for each in spike(mu, self.staleness))
        self.assign_add(variable, ops.subtract(ops.multiply(late, slot), ops.multiply(step, now)))
