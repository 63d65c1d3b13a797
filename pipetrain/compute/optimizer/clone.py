"""A stage's own optimizer: the compiled one's settings, for the stage's variables."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from pipetrain.compute.keras_private import copy_exclusions, rate_of
from pipetrain.compute.optimizer.momenta import stretched_settings
from pipetrain.compute.optimizer.rates import Rescaled, Scaled
from pipetrain.compute.optimizer.spikes import SpikeCompensated
from pipetrain.schemes.scheme import UpdateRule


def clone(
    optimizer: keras.optimizers.Optimizer,
    originals: Sequence[keras.Variable],
    copies: Sequence[keras.Variable],
    rule: UpdateRule = UpdateRule(),  # noqa: B008 - a tuple, never changed
) -> keras.optimizers.Optimizer:
    """An optimizer with the same settings for copies of variables, and no slots yet.

    A learning-rate schedule, being stateless, is shared. The ``rule`` may make it one that compensates spikes, with a
    longer momentum and a rate that is rescaled.
    """
    with tf.device(None):  # where its variables are: a remote device would have to send back what was sent to it
        config = optimizer.get_config()
    if isinstance(config["learning_rate"], dict):
        config["learning_rate"] = rate_of(optimizer)
    settings, factor = stretched_settings(optimizer, rule.stretch)
    copy = (SpikeCompensated if rule.spikes else type(optimizer)).from_config(config | settings)
    if factor != 1:
        copy.learning_rate = Scaled(rate_of(copy), factor)
    if rule.rescale_steps:
        copy.learning_rate = Rescaled(rate_of(copy), rule.rescale_steps)
    copy_exclusions(optimizer, copy, originals, copies)
    return copy
