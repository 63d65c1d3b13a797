"""The last velocity update of an optimizer: what one more step like the last would add to each weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def check_predictable(optimizer: keras.optimizers.Optimizer, scheme: str) -> None:
    """Raise ValueError, by name, for an optimizer whose velocity is not known."""
    if type(optimizer) is not keras.optimizers.SGD:
        raise ValueError(
            f"The scheme {scheme!r} predicts weights, which it can for SGD with or without momentum. "
            f"Received: optimizer={type(optimizer).__name__}. "
            "Try keras.optimizers.SGD(..., momentum=0.9), or a scheme that does not predict."
        )


class Velocity:
    """``v`` with ``W[t+1] = W[t] + v``, for ``W[t+s] ~ W[t] + s * v`` (arXiv 1809.02839, equation 4).

    SGD with momentum: its slot ``m <- mu*m - lr*g``, learning rate and sign included, is the update itself and
    costs no memory. Plain and Nesterov SGD (whose update is ``mu*m - lr*g`` with the new m) and decoupled weight
    decay: the displacement of the last step, measured. Other optimizers have none; ``read`` is then not called.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
        self._optimizer, self._variables = optimizer, list(variables)
        self._displacement: list[tf.Variable] = []
        if type(optimizer) is keras.optimizers.SGD and not self._slot_is_update():
            self._displacement = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables]

    def _slot_is_update(self) -> bool:
        optimizer = self._optimizer
        return bool(optimizer.momentum) and not optimizer.nesterov and not optimizer.weight_decay

    def update(self, gradients: list[Any]) -> None:
        """One optimizer step; remembers the displacement where no slot holds it."""
        measured = list(zip(self._displacement, self._variables, strict=False))  # none where a slot holds it
        before = [tf.identity(variable.value) for _, variable in measured]
        self._optimizer.apply(gradients, self._variables)
        for (displacement, variable), old in zip(measured, before, strict=True):
            displacement.assign(variable.value - old)

    def read(self) -> list[tf.Tensor]:
        """The last velocity update per variable; zeros before the first step."""
        if self._displacement:
            return [variable.read_value() for variable in self._displacement]
        return [slot.value.read_value() for slot in self._optimizer.momentums]
