"""Which optimizers need no more of an embedding's gradient than the sum of each row."""

from __future__ import annotations

import keras


def is_linear(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an update is a sum over the gradient's parts: Keras' SGD, with momentum or without, that clips nothing.

    Of an embedding, a gradient has a row for every word of a minibatch. In Keras other optimizers square these rows one
    by one, and clipping cuts each or takes the norm of all: two rows of one word are not the same to them as their sum.
    """
    clips = optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm
    return type(optimizer) is keras.optimizers.SGD and not any(clips)
