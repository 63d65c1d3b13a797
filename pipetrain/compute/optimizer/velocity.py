"""The last update of every variable, weight decay left out, and the multiple of it by which to predict weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from pipetrain.compute.functions.kernels import direct
from pipetrain.compute.keras_private import first_moments, second_moments
from pipetrain.compute.optimizer.clone import SpikeCompensated
from pipetrain.schemes import policies

TINY = 1e-30  # before the first step all is zero, an epsilon of 0 too


class Velocity(Protocol):
    """v of ``W[t+s] ~ W[t] + s * v`` for every variable. ``kept`` are one for each or none."""

    @property
    def kept(self) -> Sequence[tf.Variable]:
        """Variables of its own."""

    def read(self) -> list[tf.Tensor]:
        """The last step's; zeros before the first."""

    def before(self) -> list[tf.Tensor]:
        """To be called before a step of the optimizer, for ``after``."""

    def after(self, before: list[tf.Tensor]) -> None:
        """To be called after it."""


class FromSlots:
    """A velocity that follows from the optimizer's slots: it needs no memory and no work around a step."""

    kept: Sequence[tf.Variable] = ()

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer

    def before(self) -> list[tf.Tensor]:
        """Nothing."""
        return []

    def after(self, before: list[tf.Tensor]) -> None:
        """Nothing."""


class Momentum(FromSlots):
    """SGD with momentum, with or without spike compensation (arXiv 2003.11666, LWPv)."""

    def read(self) -> list[tf.Tensor]:
        """The slots."""
        return [policies.momentum(slot.value.read_value()) for slot in self._optimizer.momentums]


class RMSpropMomentum(FromSlots):
    """RMSprop with momentum."""

    def read(self) -> list[tf.Tensor]:
        """The slots, negative."""
        return [policies.rmsprop(slot.value.read_value()) for slot in first_moments(self._optimizer)]


class Adam(FromSlots):
    """Adam and AdamW, AMSGrad included; ``rate`` is that of the last step."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, rate: tf.Variable) -> None:
        super().__init__(optimizer)
        self._rate = rate

    def read(self) -> list[tf.Tensor]:
        """The last update, from the slots after it."""
        optimizer = self._optimizer
        pairs = zip(first_moments(optimizer), second_moments(optimizer), strict=True)
        return [self._of(m.value.read_value(), v.value.read_value()) for m, v in pairs]

    def _of(self, m: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        optimizer = self._optimizer
        step = tf.cast(tf.maximum(tf.convert_to_tensor(optimizer.iterations), 1), m.dtype)
        beta_1, beta_2 = (tf.cast(beta, m.dtype) for beta in (optimizer.beta_1, optimizer.beta_2))
        return policies.adam(m, v, tf.cast(self._rate, m.dtype), beta_1, beta_2, optimizer.epsilon or TINY, step)


class Displacement:
    """How far the last step went, measured: ``W[t] - W[t-1]`` for any optimizer, weight decay left out.

    It needs one more copy of the weights. For plain SGD and RMSprop no slot holds the last gradient; for others, a
    user's own among them, no formula for their slots is here. ``decayed(variable, value)`` is the value after weight
    decay.
    """

    def __init__(self, variables: Sequence[keras.Variable], decayed: Callable[[Any, tf.Tensor], tf.Tensor]) -> None:
        self._variables, self._decayed = variables, decayed
        self.kept = [tf.Variable(tf.zeros(each.shape, each.dtype), trainable=False) for each in variables]

    def read(self) -> list[tf.Tensor]:
        """The displacement that ``after`` has measured."""
        return [variable.read_value() for variable in self.kept]

    def before(self) -> list[tf.Tensor]:
        """The weights."""
        return [tf.identity(variable.value) for variable in self._variables]

    def after(self, before: list[tf.Tensor]) -> None:
        """Measure from there."""
        for kept, variable, old in zip(self.kept, self._variables, before, strict=True):
            kept.assign(variable.value - self._decayed(variable, old))


class Nesterov(Displacement):
    """SGD with Nesterov momentum, whose update is not its slot: it needs one more copy of the weights."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
        super().__init__(variables, lambda variable, value: value)
        self._optimizer = optimizer

    def before(self) -> list[tf.Tensor]:
        """The slots."""
        return [tf.identity(slot.value) for slot in self._optimizer.momentums]

    def after(self, before: list[tf.Tensor]) -> None:
        """The update, by its formula."""
        for kept, slot, old in zip(self.kept, self._optimizer.momentums, before, strict=True):
            kept.assign(policies.nesterov(slot.value, old, tf.cast(self._optimizer.momentum, old.dtype)))


def velocity_of(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    rate: tf.Variable,
    decayed: Callable[[Any, tf.Tensor], tf.Tensor],
) -> Velocity:
    """The velocity for this optimizer, by a formula where one is known; ``rate`` holds the rate of the last step."""
    kind = type(optimizer)
    if is_adam(optimizer):
        return Adam(optimizer, rate)
    if kind is keras.optimizers.RMSprop and optimizer.momentum:
        return RMSpropMomentum(optimizer)
    if kind in (keras.optimizers.SGD, SpikeCompensated) and optimizer.momentum:
        return Nesterov(optimizer, variables) if optimizer.nesterov else Momentum(optimizer)
    return Displacement(variables, decayed)


def is_adam(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether it is Adam or AdamW and no subclass, which may update otherwise."""
    return type(optimizer) in (keras.optimizers.Adam, keras.optimizers.AdamW)


class HorizonFit:
    """Repeatedly compares the weights' displacement over ``horizon`` updates with the velocity at the start.

    See ``schemes.policies.ratio``. During an observation it holds the weights and the velocity of one version: two
    copies. ``sums`` are the state that a checkpoint saves.

    Args:
        variables: the weights.
        velocity: reads the velocity of each.
        undecayed: the part of a variable's old value that weight decay leaves after a number of updates, and the number
            of velocities that they add (see ``schemes.policies.decayed``).
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
        return policies.ratio(*tf.unstack(self.sums.read_value()))

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
        sums = policies.observed(tf.unstack(self.sums), tf.add_n(along), tf.add_n(square))
        self.sums.assign(tf.stack(sums))
