"""One step of a stage's optimizer, and the velocity it leaves: what one more step like it would add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.slots import Slot, slots


def check_predictable(optimizer: keras.optimizers.Optimizer, scheme: str) -> None:
    """Raise ValueError, by name, for an optimizer whose velocity is not known."""
    if type(optimizer) is not keras.optimizers.SGD:
        raise ValueError(
            f"The scheme {scheme!r} predicts weights, which it can for SGD with or without momentum. "
            f"Received: optimizer={type(optimizer).__name__}. "
            "Try keras.optimizers.SGD(..., momentum=0.9), or a scheme that does not predict."
        )


class Update:
    """Applies gradients to variables and knows v of ``W[t+s] ~ W[t] + s * v`` (arXiv 1809.02839, equation 4).

    SGD with momentum: its slot ``m <- mu*m - lr*g``, learning rate and sign included, is the update itself and
    costs no memory. Plain and Nesterov SGD (whose update is ``mu*m - lr*g`` with the new m) and decoupled weight
    decay: the displacement of the last step, measured. Other optimizers have none; ``velocity`` is then not called.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
        self._optimizer, self._variables = optimizer, list(variables)
        self._displacement: list[tf.Variable] = []
        self._slot_is_update = _is_momentum(optimizer)
        if type(optimizer) is keras.optimizers.SGD and not self._slot_is_update:
            self._displacement = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables]

    def slots(self, weights: Sequence[keras.Variable]) -> Iterator[Slot]:
        """The optimizer's slots and the displacement, each as that of one of as many ``weights``."""
        yield from slots(self._optimizer, weights)
        for weight, variable in zip(weights, self._displacement, strict=False):
            yield Slot(weight, "displacement", variable)

    def apply(self, gradients: list[Any]) -> None:
        """One optimizer step; remembers the displacement where no slot holds it."""
        for gradient, variable in zip(gradients, self._variables, strict=True):
            if isinstance(gradient, tf.Tensor):
                gradient.set_shape(variable.shape)  # which some optimizers ask for
        if self._slot_is_update and self._plain(gradients):
            self._momentum_step(gradients)
            return
        measured = list(zip(self._displacement, self._variables, strict=False))  # none where a slot holds it
        before = [tf.identity(variable.value) for _, variable in measured]
        self._optimizer.apply(gradients, self._variables)
        for (displacement, variable), old in zip(measured, before, strict=True):
            displacement.assign(variable.value - old)

    def velocity(self) -> list[tf.Tensor]:
        """The last velocity update per variable; zeros before the first step."""
        if self._displacement:
            return [variable.read_value() for variable in self._displacement]
        return [slot.value.read_value() for slot in self._optimizer.momentums]

    def _plain(self, gradients: list[Any]) -> bool:
        """Whether the step is nothing but Keras' momentum rule on dense gradients."""
        optimizer = self._optimizer
        clips = optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm
        dense = all(isinstance(gradient, tf.Tensor) for gradient in gradients)
        return dense and not clips and not any(variable.constraint for variable in self._variables)

    def _momentum_step(self, gradients: list[Any]) -> None:
        """TensorFlow's kernel of Keras' rule: one pass over memory where the optimizer's own ops make several."""
        optimizer = self._optimizer
        for variable, slot, gradient in zip(self._variables, optimizer.momentums, gradients, strict=True):
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=variable.value.handle,
                accum=slot.value.handle,
                lr=tf.cast(optimizer.learning_rate, gradient.dtype),
                grad=gradient,
                momentum=tf.cast(optimizer.momentum, gradient.dtype),
            )
        optimizer.iterations.assign_add(1)


def _is_momentum(optimizer: keras.optimizers.Optimizer) -> bool:
    if type(optimizer) is not keras.optimizers.SGD or not optimizer.momentum:
        return False
    return not optimizer.nesterov and not optimizer.weight_decay
