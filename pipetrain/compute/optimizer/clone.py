"""A stage's own optimizer: the compiled one's class and settings, with rates and momenta of the stage's own.

What ``keras.Optimizer`` lets a class override is in tables here, since every stage or device has a clone for its own
weights. Every Keras method is in one of them; ``tests/fit/test_keras_methods.py`` goes through all that Keras has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import isroutine
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from pipetrain.compute.keras_private import WHOLE_STEP, copy_exclusions, index_of, is_own, overridden, rate_of
from pipetrain.schemes.policies import OneTargetPolicy, rescaled, spike, stretched
from pipetrain.schemes.scheme import Scheme, UpdateRule

# A clone has these too, for its own weights.
PER_WEIGHT = (
    *("add_optimizer_variables", "add_variable", "add_variable_from_reference", "assign", "assign_add", "assign_sub"),
    *("build", "from_config", "get_config", "iterations", "learning_rate", "update_step"),
)
# Are given all gradients of a step: a clone has them where it has all weights.
WHOLE = ("apply", "apply_gradients", *WHOLE_STEP)
# Keras, or a program, calls these of the compiled optimizer itself, which has the slots of all clones.
OF_COMPILED = (
    *("exclude_from_weight_decay", "finalize_variable_values", "load_own_variables", "save_own_variables"),
    *("set_weights", "variables"),
)
UNASKED = ("stateless_apply",)  # is not called where TensorFlow computes
NEVER = ("scale_loss",)  # the last stage scales its loss by ``loss_scale_factor``


def whole_step(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """The methods of a class of the user's that look at all gradients of a step at once."""
    return overridden(optimizer, WHOLE)


def not_cloned(optimizer: keras.optimizers.Optimizer, copy: keras.optimizers.Optimizer) -> Iterator[str]:
    """The attributes of an optimizer that a copy made by its class and config has not: settings, and own functions.

    Variables, and what is made of them, are no settings; nor is what it remembers, once built, under private names.
    """
    theirs, no_setting = vars(copy), object()
    for name, value in vars(optimizer).items():
        is_setting = value is None or isroutine(value) or isinstance(value, bool | int | float | str)
        is_memory = name in ("built", "name") or (name.startswith("_") and optimizer.built)
        if is_setting and not is_memory and rate_of(optimizer) is not value:
            copied = theirs.get(name, no_setting)
            if value is not copied and value != copied:
                yield name


def is_linear(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an update is a sum over the gradient's parts: Keras' SGD, with momentum or without, that clips nothing.

    Of an embedding, a gradient has a row for every word of a minibatch. In Keras other optimizers square these rows one
    by one, and clipping cuts each or takes the norm of all: two rows of one word are not the same to them as their sum.
    """
    clips = optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm
    return type(optimizer) is keras.optimizers.SGD and not any(clips)


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
    """A learning rate rescaled by the ``staleness``; see ``schemes.policies.rescaled``.

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


# The settings of Keras' optimizers that say for how long a gradient counts. Others have none, or none that is known.
SUMS = {"SGD": ("momentum",), "RMSprop": ("momentum",)}
AVERAGES = {  # Muon's momentum is a sum, of which it takes the direction alone
    **dict.fromkeys(("Adam", "AdamW", "Adamax", "Nadam", "Lamb"), ("beta_1",)),
    "Muon": ("momentum", "adam_beta_1"),
}


def momenta(optimizer: keras.optimizers.Optimizer) -> dict[str, float]:
    """The momenta of an optimizer by the names of its settings; none for one that has none which is known."""
    kind = type(optimizer)
    names = (SUMS | AVERAGES).get(kind.__name__, ()) if is_own(kind) else ()
    return {name: float(getattr(optimizer, name)) for name in names if getattr(optimizer, name)}


def stretched_settings(optimizer: keras.optimizers.Optimizer, factor: float) -> tuple[dict[str, Any], float]:
    """The settings that are different where momentum is stretched, and by what the learning rate is multiplied.

    Decoupled weight decay, which Keras multiplies by the learning rate, is to stay what it is.
    """
    longer = {name: stretched(mu, factor) for name, mu in momenta(optimizer).items()}
    if factor == 1 or not longer:
        return {}, 1.0
    if type(optimizer).__name__ not in SUMS:
        return longer, 1.0
    return longer | ({"weight_decay": optimizer.weight_decay / factor} if optimizer.weight_decay else {}), factor


def with_known_momentum(scheme: Scheme, optimizer: keras.optimizers.Optimizer) -> Scheme:
    """The scheme with its ``stretch_momentum="auto"`` decided: True for an optimizer whose momentum is known."""
    if not scheme.stretches or scheme.policy != OneTargetPolicy("auto"):
        return scheme
    return scheme._replace(policy=OneTargetPolicy(bool(momenta(optimizer))))


def told(optimizer: keras.optimizers.Optimizer, factor: float) -> str:
    """For people, in a line: what is stretched."""
    settings, scaled = stretched_settings(optimizer, factor)
    longer = [f"{name}={mu:g} becomes {settings[name]:.4g}" for name, mu in momenta(optimizer).items()]
    rate = f", and its learning rate is multiplied by {scaled:.4g}" if scaled != 1 else ""
    return f"{type(optimizer).__name__}'s {' and '.join(longer)}{rate}"


def plain_momentum(optimizer: keras.optimizers.Optimizer) -> float:
    """The momentum of Keras' SGD where that is not Nesterov's, and nothing clips or accumulates gradients; else 0."""
    is_plain = is_linear(optimizer) and not optimizer.nesterov and not optimizer.gradient_accumulation_steps
    return float(optimizer.momentum) if is_plain else 0.0


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

    See ``schemes.policies.spike``.
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


def clone(
    optimizer: keras.optimizers.Optimizer,
    originals: Sequence[keras.Variable],
    copies: Sequence[keras.Variable],
    rule: UpdateRule = UpdateRule(),  # noqa: B008 - a tuple, never changed
) -> keras.optimizers.Optimizer:
    """An optimizer with the same settings for copies of variables, and no slots yet.

    A learning-rate schedule, being stateless, is shared. The ``rule`` may make it one that compensates spikes, with a
    longer momentum and a rate that is rescaled, or without momentum.
    """
    with tf.device(None):  # where its variables are: a remote device would have to send back what was sent to it
        config = optimizer.get_config()
    if isinstance(config["learning_rate"], dict):
        config["learning_rate"] = rate_of(optimizer)
    settings, factor = stretched_settings(optimizer, rule.stretch)
    if not rule.momentum:
        settings["momentum"] = 0.0
    copy = (SpikeCompensated if rule.spikes else type(optimizer)).from_config(config | settings)
    if factor != 1:
        copy.learning_rate = Scaled(rate_of(copy), factor)
    if rule.rescale_steps:
        copy.learning_rate = Rescaled(rate_of(copy), rule.rescale_steps)
    copy_exclusions(optimizer, copy, originals, copies)
    return copy
