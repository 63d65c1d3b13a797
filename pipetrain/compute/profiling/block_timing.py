"""Time consecutive blocks as a stage would run them: all forwards, all backwards, the optimizer's step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from pipetrain.compute.cores import finish, is_remote, pinned
from pipetrain.compute.functions.split import specs
from pipetrain.compute.functions.weight_binding import direct
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.optimizer.update import Update
from pipetrain.compute.profiling.block_functions import BlockFunctions, either, values

WALKS = 4  # a figure is the median of at least so many walks
MEASURE_S = 0.2  # and of as many as this takes,
STEADY = 0.02  # and of more until the standard error of the whole is this part of it,
AT_MOST_S = 2.0  # or this many seconds are over
MANY = 33  # tensors of an empty call, beside those of one tensor

Floats = NDArray[np.float64]


class Placed(NamedTuple):
    """A block with its functions, and specs of what goes in and comes out."""

    segment: Segment
    functions: BlockFunctions
    inputs: list[tf.TensorSpec]
    outputs: list[tf.TensorSpec]


class Seconds(NamedTuple):
    """Medians over the walks: forward and backward of every block, the update of all; the error of their sum."""

    forward: Floats
    backward: Floats
    update: float
    error: float


class TimedBlocks(NamedTuple):
    """Seconds of one walk; ``calls`` of the empty calls between the blocks, with one tensor and with ``MANY``."""

    forward: list[float]
    backward: list[float]
    update: float
    calls: list[tuple[float, float]]

    @property
    def whole(self) -> float:
        """All but the empty calls."""
        return sum(self.forward) + sum(self.backward) + self.update


def walk(blocks: Sequence[Placed], device: str, others: Sequence[str]) -> Seconds:
    """Walk the blocks to the end and back until the figures are steady, or that takes too long.

    Blocks alone, again and again, would find their weights and buffers in the cache: a third too fast on a CPU.
    Meanwhile the other devices do the same, as in training they will be busy too: logical devices of one processor
    share its memory, and TensorFlow's threads.
    """
    with ExitStack() as company:
        for other in others:
            company.enter_context(_walking(blocks, other))
        company.enter_context(pinned(device))  # last: a new thread would stay on this one's core
        once = (_timed_there if is_remote(device) else _walker)(blocks, device)
        once()
        taken, timing = _until_steady(once)
    empty_s = _empty_call([call for each in taken for call in each.calls])
    forward, backward = (np.median(each, axis=0) for each in list(zip(*taken, strict=True))[:2])
    forward -= [empty_s(block.functions.forward_tensors) for block in blocks]
    backward -= [empty_s(block.functions.backward_tensors) for block in blocks]
    update_s = float(np.median([each.update for each in taken])) - empty_s(1)
    return Seconds(np.maximum(forward, 0.0), np.maximum(backward, 0.0), max(update_s, 0.0), timing.error_s)


def _until_steady(once: Callable[[], TimedBlocks]) -> tuple[list[TimedBlocks], Timing]:
    taken: list[TimedBlocks] = []
    while True:
        taken.append(once())
        wholes = [each.whole for each in taken]
        timing = summary(wholes)
        if len(taken) < WALKS or sum(wholes) < MEASURE_S:
            continue
        if timing.error_s <= STEADY * timing.median_s or sum(wholes) >= AT_MOST_S:
            return taken, timing


def _empty_call(calls: Sequence[tuple[float, float]]) -> Callable[[int], float]:
    """What a call costs beside its work, by the number of its tensors: blocks in one function do not have it."""
    one, many = np.median(calls, axis=0)
    per_tensor_s = max(many - one, 0.0) / (2 * MANY - 2)
    return lambda tensors: float(one + (tensors - 2) * per_tensor_s)


@contextmanager
def _walking(blocks: Sequence[Placed], device: str) -> Iterator[None]:
    """Another thread walks on this device meanwhile."""
    stop = threading.Event()

    def run() -> None:
        with pinned(device):
            once = _whole(blocks, device)
            while not stop.is_set():
                once()

    with ThreadPoolExecutor(1, "pipetrain profile") as threads:
        running = threads.submit(run)
        try:
            yield
        finally:
            stop.set()
    running.result()


class _Ready(NamedTuple):
    """What a walk needs on its device: inputs by value, weights, state and gradients by block, the optimizer's step."""

    given: dict[int, tf.Tensor]
    weights: list[list[tf.Tensor]]
    state: list[list[tf.Tensor]]
    output_gradients: list[list[tf.Tensor]]
    copies: list[keras.Variable]
    update: Callable[[list[Any]], Any]

    @classmethod
    def on(cls, device: str, blocks: Sequence[Placed]) -> _Ready:
        made = {value for block in blocks for value in block.segment.writes}
        inputs = [pair for block in blocks for pair in zip(block.segment.reads, block.inputs, strict=True)]
        with tf.device(device):
            copies = [keras.Variable(tf.zeros(each.shape, each.dtype)) for each in _variables(blocks)]
            return cls(
                {value: sample(spec) for value, spec in inputs if value not in made},
                [values(block.segment.trainable_variables) for block in blocks],
                [values(block.segment.non_trainable_variables) for block in blocks],
                [block.functions.ones(block.outputs) for block in blocks],
                copies,
                _update(blocks, copies),
            )


def _whole(blocks: Sequence[Placed], device: str) -> Callable[[], None]:
    """A function that walks once, in one call: Python would hold up the one whose blocks are timed."""
    given, weights, state, output_gradients, _, update = _Ready.on(device, blocks)

    def run() -> tuple[list[Any], list[Any]]:
        known = dict(given)
        kept: list[Any] = []
        by_weight: list[Any] = []
        by_flow: list[Any] = []
        for n, block in enumerate(blocks):
            inputs = [known[value] for value in block.segment.reads]
            outputs, residuals = block.functions.forward(weights[n], state[n], inputs)
            known.update(zip(block.segment.writes, outputs, strict=True))
            kept.append(residuals)
        for n in range(len(blocks) - 1, -1, -1):
            gradients, others = blocks[n].functions.backward(weights[n], kept.pop(), output_gradients[n])
            by_weight[:0] = gradients
            by_flow += others
        return by_weight, by_flow  # what is not returned is not computed

    with tf.device(device):
        call = direct(tf.function(run, autograph=False).get_concrete_function())

    def once() -> None:
        with tf.device(device):
            gradients, _ = call()
            update(gradients)
        finish(device)  # calls of another process would queue up there, and keep it busy long after

    return once


def _walker(blocks: Sequence[Placed], device: str) -> Callable[[], TimedBlocks]:
    """A function that walks once and times every call."""
    last = {value: n for n, block in enumerate(blocks) for value in block.segment.reads}
    given, weights, state, output_gradients, _, update = _Ready.on(device, blocks)
    with tf.device(device):
        nothing = [_nothing(count) for count in (1, MANY)]

    def once() -> TimedBlocks:
        known = dict(given)
        kept: list[Any] = []
        gradients: list[Any] = []
        calls: list[Any] = []
        forward_s, backward_s = [0.0] * len(blocks), [0.0] * len(blocks)
        with tf.device(device):
            for n, block in enumerate(blocks):
                inputs = [known[value] for value in block.segment.reads]
                start_s = time.perf_counter()
                outputs, residuals = block.functions.forward(weights[n], state[n], inputs)
                forward_s[n] = _since(start_s)
                kept.append(residuals)
                known.update(zip(block.segment.writes, outputs, strict=True))
                for value in block.segment.reads:
                    if last[value] == n:
                        del known[value]
                del inputs, outputs, residuals  # what no backward needs is free for the next block
                calls.append((_seconds(nothing[0]), _seconds(nothing[1])))
            for n in range(len(blocks) - 1, -1, -1):
                residuals = kept.pop()
                start_s = time.perf_counter()
                by_weight, _ = blocks[n].functions.backward(weights[n], residuals, output_gradients[n])
                backward_s[n] = _since(start_s)
                gradients[:0] = by_weight
            return TimedBlocks(forward_s, backward_s, _seconds(lambda: update(gradients)), calls)

    return once


def _timed_there(blocks: Sequence[Placed], device: str) -> Callable[[], TimedBlocks]:
    """A function that walks once, in one call, and has the times taken by the process whose device it is.

    Seen from here, each would have the way there and back in it.
    """
    given, weights, state, output_gradients, copies, update = _Ready.on(device, blocks)
    with tf.device(device):
        seen = tf.Variable(0.0)

    def run() -> tf.Tensor:
        known, times = dict(given), [tf.timestamp()]
        kept: list[Any] = []
        by_weight: list[Any] = []
        for n, block in enumerate(blocks):
            inputs = [known[value] for value in block.segment.reads]
            outputs, residuals = block.functions.forward(*_from(times[-1], (weights[n], state[n], inputs)))
            times.append(_after([*outputs, *residuals], seen))
            known.update(zip(block.segment.writes, outputs, strict=True))
            kept.append(residuals)
        for n in range(len(blocks) - 1, -1, -1):
            gradients, others = blocks[n].functions.backward(
                *_from(times[-1], (weights[n], kept.pop(), output_gradients[n]))
            )
            times.append(_after([*gradients, *others], seen))
            by_weight[:0] = gradients
        update(_from(times[-1], by_weight))
        return tf.stack([*times, _after([copy.value.read_value() for copy in copies], seen)])

    with tf.device(device):
        call = direct(tf.function(run, autograph=False).get_concrete_function())

    def once() -> TimedBlocks:
        with tf.device(device):
            taken = np.diff(tf.nest.flatten(call())[0].numpy()).tolist()
        count = len(blocks)
        return TimedBlocks(taken[:count], taken[count : 2 * count][::-1], taken[-1], [(0.0, 0.0)])

    return once


def _from(when: tf.Tensor, tensors: Any) -> Any:
    """The same tensors, but not before this time: so what reads them, inlined or not, cannot begin earlier."""
    with tf.control_dependencies([when]):
        return tf.nest.map_structure(tf.identity, tensors)


def _after(tensors: Sequence[tf.Tensor], seen: tf.Variable) -> tf.Tensor:
    """The time when all these are there; to wait for a call alone is to wait for its side effects.

    A number of each goes into a variable: what nothing reads but for its order, TensorFlow would not compute.
    """
    present = [each for each in tensors if each is not None]
    numbers = [each for each in present if each.dtype.is_floating or each.dtype.is_integer]
    read = [tf.reduce_sum(tf.cast(tf.reshape(each, [-1])[:1], tf.float32)) for each in numbers]
    with tf.control_dependencies([*map(tf.identity, present), seen.assign(tf.add_n([tf.zeros([]), *read]))]):
        return tf.timestamp()


def _variables(blocks: Sequence[Placed]) -> list[keras.Variable]:
    return [variable for block in blocks for variable in block.segment.trainable_variables]


def _update(blocks: Sequence[Placed], copies: list[keras.Variable]) -> Callable[[list[Any]], Any]:
    """One step of SGD with momentum on copies of the blocks' variables, from their gradients."""
    if not copies:
        return lambda gradients: None
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    optimizer.build(copies)
    step = Update(optimizer, copies)
    apply = tf.function(lambda gradients: step.apply(gradients), autograph=False)
    call = either(apply.get_concrete_function([each for block in blocks for each in block.functions.gradients]))

    def update(gradients: Any, kept: Any = step) -> Any:  # a function alone would not keep the optimizer's variables
        return call(gradients)

    return update


class Timing(NamedTuple):
    """Median seconds, and the standard error of this median."""

    median_s: float
    error_s: float


def summary(taken: Sequence[float] | Floats) -> Timing:
    """The median, and its error from the quartiles, which a few calls that were held up do not move.

    ``1.25 * (q3 - q1) / 1.35 / sqrt(n)``, as for normally distributed times.
    """
    first, median, third = np.quantile(taken, (0.25, 0.5, 0.75))
    return Timing(float(median), float(1.25 * (third - first) / 1.35 / len(taken) ** 0.5))


def sample(spec: tf.TensorSpec) -> tf.Tensor:
    """A tensor like this: normally distributed numbers, or zeros where they are integers."""
    if spec.dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(spec.shape, seed=(0, 0)), spec.dtype)
    return tf.zeros(spec.shape, spec.dtype)


def _nothing(count: int) -> Callable[[], Any]:
    """A call with so many tensors that does nothing."""
    tensors = [tf.constant(0.0)] * count
    call = direct(tf.function(lambda *each: each).get_concrete_function(*specs(tensors)))
    return lambda: call(*tensors)


def _seconds(call: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    call()
    return _since(start_s)


def _since(start_s: float) -> float:
    tf.test.experimental.sync_devices()
    return time.perf_counter() - start_s
