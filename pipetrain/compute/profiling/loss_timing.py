"""What a loss and a metric of a model's outputs take, where they are large enough to count, as words' scores are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import finish, is_remote, pinned
from pipetrain.compute.functions.kernels import direct
from pipetrain.compute.functions.split import size_bytes
from pipetrain.compute.profiling.block_passes import after_time, sample, seconds_of, time_of
from pipetrain.compute.profiling.block_timing import always, busy, until_steady

COUNTS_BYTES = 2**18  # of outputs; the loss of fewer takes less than a profile can tell

Tensors = list[tf.Tensor]


class LossSeconds(NamedTuple):
    """What a loss takes with its gradients, and what a metric takes."""

    loss_s: float
    metric_s: float


def time_loss(
    outputs: Sequence[tf.TensorSpec], device: str, others: Sequence[str], has_time: Callable[[], bool] = always
) -> LossSeconds:
    """The seconds of a cross-entropy of the outputs and of their accuracy; zeros for small outputs.

    They are computed several times, but for once where nothing ``has_time``.

    They stand for what is compiled later, as SGD does for the optimizer. The other devices do the same meanwhile.
    """
    scores = [spec for spec in outputs if spec.dtype.is_floating and spec.shape.rank]
    if sum(map(size_bytes, scores)) < COUNTS_BYTES:
        return LossSeconds(0.0, 0.0)
    with ExitStack() as company:
        for other in others:
            company.enter_context(busy(partial(_untimed, scores, other), other))
        company.enter_context(pinned(device))
        parts = [_timed(scores, part, device) for part in (_loss, _accuracy)]

        def once() -> LossSeconds:
            return LossSeconds(parts[0](), parts[1]())

        once()
        taken, _ = until_steady(once, lambda each: each.loss_s + each.metric_s, has_time)
    return LossSeconds(*np.median(taken, axis=0).tolist())


def _timed(scores: Sequence[tf.TensorSpec], part: Callable[[Tensors], Tensors], device: str) -> Callable[[], float]:
    """A function that computes one of them once, in seconds; on a worker it is timed there."""
    with tf.device(device):
        given, seen = [sample(spec) for spec in scores], tf.Variable(0.0)

        def clocked(tensors: Tensors) -> tf.Tensor:
            start = tf.timestamp()
            return time_of(part(after_time(start, tensors)), seen) - start

        function = tf.function(clocked if is_remote(device) else part, autograph=False)
        call = direct(function.get_concrete_function(given))

    def once() -> float:
        with tf.device(device):
            return float(call(given)) if is_remote(device) else seconds_of(lambda: call(given))

    return once


def _untimed(scores: Sequence[tf.TensorSpec], device: str) -> Callable[[], None]:
    """A function that keeps a device busy with the loss."""
    once = _timed(scores, _loss, device)

    def run() -> None:
        once()
        finish(device)

    return run


def _loss(tensors: Tensors) -> Tensors:
    """The loss of the first class everywhere, and its gradients."""
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        loss = tf.add_n([tf.reduce_mean(_cross_entropy(each)) for each in tensors])
    return [loss, *tape.gradient(loss, tensors)]


def _cross_entropy(scores: tf.Tensor) -> tf.Tensor:
    scores = tf.cast(scores, keras.config.floatx())  # as Keras' losses do
    return keras.losses.sparse_categorical_crossentropy(_labels(scores), scores, from_logits=True)


def _accuracy(tensors: Tensors) -> Tensors:
    return [tf.reduce_mean(keras.metrics.sparse_categorical_accuracy(_labels(each), each)) for each in tensors]


def _labels(scores: tf.Tensor) -> tf.Tensor:
    return tf.zeros(tf.shape(scores)[:-1], tf.int32)
