"""What a minibatch takes by one way to train: a trial with a model's own ``fit``, of which nothing remains in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from pipetrain.checkpoint.arrays import assign, collected
from pipetrain.compute.optimizer.clone import clone
from pipetrain.compute.optimizer.loss_scaling import stepping
from pipetrain.run.trial import Clock

MOST = 10**6  # minibatches, of which the clock needs fewer


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
    """Median seconds from one minibatch to the next while a model trains on this data; infinite if it is refused.

    Args:
        make: gives the model of one way to train.
        data: inputs and labels of a minibatch.
        compiled: the arguments of ``compile``.

    Raises what training raises, but for a ValueError, which says that the way is not for this model.
    """
    timing = _Timing()
    try:
        model = make()
        model.compile(**compiled)
        again = tf.data.Dataset.from_tensors(data).repeat()
        model.fit(again, steps_per_epoch=MOST, shuffle=False, verbose=0, callbacks=[timing])
    except ValueError:
        return math.inf
    return timing.clock.median_s


def for_trials(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> keras.optimizers.Optimizer:
    """An optimizer that does the same work, without a step: the weights stay, and losses finite."""
    copy = clone(stepping(optimizer), model.trainable_variables, model.trainable_variables)
    copy.learning_rate = 0.0
    return copy


@contextmanager
def kept(model: keras.Model) -> Iterator[None]:
    """In the end the model has the weights and the state that it had, whatever was done with it."""
    arrays = collected(model, (), ())
    try:
        yield
    finally:
        assign(model, arrays, (), ())
