"""What a minibatch takes by one way to train: a trial with a model's own ``fit``, of which nothing remains in it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipetrain.checkpoint.arrays import assign, collected
from pipetrain.compute.keras_private import rate_of
from pipetrain.compute.optimizer.clone import clone
from pipetrain.compute.optimizer.loss_scaling import stepping
from pipetrain.run.trial import Clock

MOST = 10**6  # minibatches, of which the clock needs fewer
TINY = 1e-20  # of the learning rate; some optimizers divide by it
FAILURES = (ValueError, TypeError, NotImplementedError, FloatingPointError, tf.errors.OpError)


class _Timing(keras.callbacks.Callback):
    """Stops training when enough minibatches are timed."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A result is there."""
        self.clock.tick()
        self.model.stop_training = self.model.stop_training or self.clock.is_enough


def trial_s(make: Callable[[], keras.Model], data: Any, compiled: dict[str, Any]) -> float:
    """Median seconds from one minibatch to the next while a model trains on this data; infinite if it cannot.

    Args:
        make: gives the model of one way to train.
        data: inputs and labels of a minibatch.
        compiled: the arguments of ``compile``.

    Raises what training raises, but for what may be due to this way: that it is refused, or needs too much memory.
    """
    timing = _Timing()
    try:
        model = make()
        model.compile(**compiled)
        again = tf.data.Dataset.from_tensors(data).repeat()
        model.fit(again, steps_per_epoch=MOST, shuffle=False, verbose=0, callbacks=[timing])
    except FAILURES:
        return math.inf
    return timing.clock.median_s


def for_trials(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> keras.optimizers.Optimizer:
    """An optimizer that does the same work, with tiny steps unless a schedule or a function gives the learning rate.

    The loss of a minibatch that comes again then stays what it is.
    """
    variables, steps = model.trainable_variables, stepping(optimizer)
    copy = clone(steps, variables, variables)
    if isinstance(rate_of(copy), keras.Variable):
        copy.learning_rate = TINY
    return copy if steps is optimizer else keras.optimizers.LossScaleOptimizer(copy)


@contextmanager
def kept(model: keras.Model) -> Iterator[None]:
    """In the end the model has the weights and the state that it had, whatever was done with it.

    Python's and NumPy's random numbers, from which Keras draws seeds, go on as if nothing had been.
    """
    arrays, drawn, of_numpy = collected(model, (), ()), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        assign(model, arrays, (), ())
        random.setstate(drawn)
        np.random.set_state(of_numpy)
