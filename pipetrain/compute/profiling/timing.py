"""Times on a device under the conditions of training: of consecutive blocks, and of a large loss and its metrics."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from pipetrain.compute.cores import finish, is_remote, pinned
from pipetrain.compute.functions.kernels import Kernels, direct
from pipetrain.compute.functions.split import size_bytes, specs
from pipetrain.compute.functions.weight_groups import like
from pipetrain.compute.optimizer.clone import clone
from pipetrain.compute.optimizer.update import Update
from pipetrain.compute.profiling.block_passes import (
    MANY,
    Placed,
    TimedBlocks,
    after_time,
    joined_pass,
    local_pass,
    remote_pass,
    sample,
    seconds_of,
    time_of,
    untimed_pass,
)
from pipetrain.compute.transfers.compression import codec_of
from pipetrain.plan.profile import Coding
from pipetrain.schemes.compression import Compression

PASSES = 4  # a figure is the median of at least so many passes
MEASURE_S = 0.2  # and of as many as this takes,
STEADY = 0.02  # and of more until the standard error of the whole is this part of it,
AT_MOST_S = 2.0  # or this many seconds are over
LEAST_S = 1e-9  # of a block that takes no longer than an empty call: a step is to take some time

Floats = NDArray[np.float64]
Taken = TypeVar("Taken")


class MeasuredSeconds(NamedTuple):
    """Medians over the passes: forward and backward of every block, the update of all; the error of their sum."""

    forward: Floats
    backward: Floats
    update: float
    error: float


class Coded(NamedTuple):
    """Matrices of so many rows and columns, by which it is measured what a compression takes, and how often."""

    side: int
    times: int


STEPS = 5  # of an optimizer, of which the median counts
SMALL, LARGE, TOGETHER = Coded(16, 100), Coded(1024, 5), 16


def time_coding(compression: Compression, device: str) -> Coding:
    """What a compression takes on a device: a straight line through a small and a large message.

    Messages are made within functions, of many variables at once. What a call takes beside is therefore left out: a
    small message takes a 15th of what 16 in one function take more than one; on a worker its own clock tells that,
    since a call to it takes longer the more tensors there are.
    """
    calls = (SMALL, 1), (SMALL, TOGETHER), (LARGE, 1)
    lines = []
    for one_s, together_s, large_s in zip(*(_coding_of(compression, *each, device) for each in calls), strict=True):
        small_s = max(together_s - one_s, 0.0) / (TOGETHER - 1)
        call_s = max(one_s - small_s, 0.0)
        small, large = SMALL.side**2, LARGE.side**2
        element_s = max(large_s - call_s - small_s, 0.0) / (large - small)
        lines.append((max(small_s - small * element_s, 0.0), element_s))
    return Coding(str(compression), *lines)


def _coding_of(compression: Compression, coded: Coded, count: int, device: str) -> tuple[float, float]:
    """Seconds to encode, and to decode, so many matrices in one function, one after another."""
    spec, step = tf.TensorSpec([coded.side, coded.side], tf.float32), tf.zeros([], tf.int64)
    with tf.device(device):
        codec = codec_of(compression, spec)
        like = codec.memory_like
        memory = None if like is None else [tf.random.stateless_normal(like.shape, (1, n)) for n in range(count)]
        values = [tf.random.stateless_normal(spec.shape, (0, n)) for n in range(count)]

        def encoded(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return _in_turn(values, lambda n, each: codec.message(each, (step, n), 0, memory and memory[n])[0])

        def decoded(messages: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return _in_turn(messages, lambda n, each: codec.value(each, (step, n)))

        messages = Kernels().op(encoded, specs(values))(values)

        def seconds(make: Callable[[Tensors], Tensors], given: Tensors) -> float:
            once = _timed(make, given, device)
            return statistics.median([once() for _ in range(coded.times + 1)][1:])  # the first one prepares it

        return seconds(encoded, values), seconds(decoded, messages)


def _in_turn(tensors: Sequence[tf.Tensor], make: Callable[[int, tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
    """What is made of each, by its number, within a function, when that of the one before is there: by one core."""
    made: list[tf.Tensor] = []
    for n, each in enumerate(tensors):
        with tf.control_dependencies(made[-1:]):
            made.append(make(n, each))
    return made


def time_step(optimizer: keras.optimizers.Optimizer, weight: keras.Variable, device: str) -> float:
    """Seconds of the optimizer's step for a weight of this shape, type and path; on a worker they are timed there."""
    spec = tf.TensorSpec(weight.shape, weight.dtype)
    with tf.device(device):
        copy, seen = like(weight, sample(spec)), tf.Variable(0.0)
        mine = clone(optimizer, [weight], [copy])
        mine.build([copy])
        step = Update(mine, [copy])

        def clocked(gradient: tf.Tensor) -> tf.Tensor:
            start = tf.timestamp()
            step.apply([after_time(start, gradient)])
            return time_of([copy.value.read_value()], seen) - start

        call = direct(tf.function(clocked, autograph=False).get_concrete_function(spec))
        gradient = sample(spec)
        with pinned(device):
            taken_s = [float(call(gradient)) for _ in range(STEPS + 1)]  # the first one prepares it
    return statistics.median(taken_s[1:])


def always() -> bool:
    """There is time for another pass."""
    return True


def time_blocks(
    blocks: Sequence[Placed],
    device: str,
    others: Sequence[str],
    are_neighbours: bool = True,
    has_time: Callable[[], bool] = always,
) -> MeasuredSeconds:
    """Run the blocks forward and backward, pass by pass, until the figures are steady or ``AT_MOST_S`` are over.

    They end too, after one pass at least, where nothing ``has_time``.

    A block that is run repeatedly by itself would find its weights and buffers in the cache, and be a third too fast on
    a CPU. The other devices run the same blocks at the same time, because they are busy in training too: logical
    devices of one processor share its memory and TensorFlow's threads.

    If they ``are_neighbours``, all blocks run in one call by turns with them, where neighbours share kernels, as in a
    stage: each block gets its part of what that takes.
    """
    with ExitStack() as company:
        for other in others:
            company.enter_context(busy(partial(untimed_pass, blocks, other), other))
        company.enter_context(pinned(device))  # last: a new thread would stay on this one's core
        once = (remote_pass if is_remote(device) else local_pass)(blocks, device)
        joined = joined_pass(blocks, device) if are_neighbours and not is_remote(device) else None
        once()
        joined_s = [] if joined is None else [joined()]
        taken, timing = until_steady(lambda: _both(once, joined, joined_s), lambda each: each.whole, has_time)
    empty_s = _empty_call([call for each in taken for call in each.calls])
    forward, backward = (np.median(each, axis=0) for each in list(zip(*taken, strict=True))[:2])
    forward -= [empty_s(block.functions.forward_tensors) for block in blocks]
    backward -= [empty_s(block.functions.backward_tensors) for block in blocks]
    update_s = float(np.median([each.update for each in taken])) - empty_s(1)
    forward, backward = np.maximum(forward, LEAST_S), np.maximum(backward, LEAST_S)
    together_s = float(np.median(joined_s[1:])) - empty_s(2) if joined_s else 0.0
    if together_s > 0 and forward.sum() + backward.sum() > 0:
        part = together_s / (forward.sum() + backward.sum())
        forward, backward = part * forward, part * backward
    return MeasuredSeconds(forward, backward, max(update_s, 0.0), timing.error_s)


def _both(once: Callable[[], TimedBlocks], joined: Callable[[], float] | None, joined_s: list[float]) -> TimedBlocks:
    """One pass block by block, after which one pass in one call is noted."""
    taken = once()
    if joined is not None:
        joined_s.append(joined())
    return taken


def until_steady(
    once: Callable[[], Taken], seconds_of: Callable[[Taken], float], has_time: Callable[[], bool] = always
) -> tuple[list[Taken], Timing]:
    """What each pass took, of as many as it needs until their ``seconds_of`` are steady, and the summary of these."""
    taken: list[Taken] = []
    while True:
        taken.append(once())
        wholes = [seconds_of(each) for each in taken]
        timing = summary(wholes)
        is_enough = len(taken) >= PASSES and sum(wholes) >= MEASURE_S
        if is_enough and (timing.error_s <= STEADY * timing.median_s or sum(wholes) >= AT_MOST_S):
            return taken, timing
        if not has_time():
            return taken, timing


def _empty_call(calls: Sequence[tuple[float, float]]) -> Callable[[int], float]:
    """Seconds of an empty call, by the number of its tensors; blocks in one function do not have this overhead."""
    one, many = np.median(calls, axis=0)
    per_tensor_s = max(many - one, 0.0) / (2 * MANY - 2)
    return lambda tensors: float(one + (tensors - 2) * per_tensor_s)


@contextmanager
def busy(work: Callable[[], Callable[[], None]], device: str) -> Iterator[None]:
    """Do the work on this device in another thread during the context, which begins after it was done once.

    At first kernels are chosen and compiled, which is not what keeps a device busy in training.
    """
    stop, is_busy = threading.Event(), threading.Event()

    def run() -> None:
        try:
            with pinned(device):
                once = work()
                while not stop.is_set():
                    once()
                    is_busy.set()
        finally:
            is_busy.set()  # a failure is raised when the context ends

    with ThreadPoolExecutor(1, "pipetrain profile") as threads:
        running = threads.submit(run)
        try:
            is_busy.wait()
            yield
        finally:
            stop.set()
    running.result()


class Timing(NamedTuple):
    """Median seconds, and the standard error of this median."""

    median_s: float
    error_s: float


def summary(taken: Sequence[float] | Floats) -> Timing:
    """The median, and its error from the quartiles, which a few delayed calls do not change.

    ``1.25 * (q3 - q1) / 1.35 / sqrt(n)``, as for normally distributed times.
    """
    first, median, third = np.quantile(taken, (0.25, 0.5, 0.75))
    return Timing(float(median), float(1.25 * (third - first) / 1.35 / len(taken) ** 0.5))


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
        with tf.device(device):
            given = [sample(spec) for spec in scores]
        parts = [_timed(part, given, device) for part in (_loss, _accuracy)]

        def once() -> LossSeconds:
            return LossSeconds(parts[0](), parts[1]())

        once()
        taken, _ = until_steady(once, lambda each: each.loss_s + each.metric_s, has_time)
    return LossSeconds(*np.median(taken, axis=0).tolist())


def _timed(make: Callable[[Tensors], Tensors], given: Tensors, device: str) -> Callable[[], float]:
    """A function that makes something of these tensors once, in seconds; on a worker it is timed there."""
    with tf.device(device):
        seen = tf.Variable(0.0)

        def clocked(tensors: Tensors) -> tf.Tensor:
            start = tf.timestamp()
            return time_of(make(after_time(start, tensors)), seen) - start

        function = tf.function(clocked if is_remote(device) else make, autograph=False)
        call = direct(function.get_concrete_function(given))

    def once() -> float:
        with tf.device(device):
            return float(call(given)) if is_remote(device) else seconds_of(lambda: call(given))

    return once


def _untimed(scores: Sequence[tf.TensorSpec], device: str) -> Callable[[], None]:
    """A function that keeps a device busy with the loss."""
    with tf.device(device):
        given = [sample(spec) for spec in scores]
    once = _timed(_loss, given, device)

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
