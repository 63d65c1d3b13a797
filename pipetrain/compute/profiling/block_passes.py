"""One pass over consecutive blocks as a stage would run them: all forwards, all backwards, the optimizer's step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import finish
from pipetrain.compute.functions.kernels import by_xla, direct
from pipetrain.compute.functions.split import specs
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.optimizer.update import Update
from pipetrain.compute.profiling.block_functions import BlockFunctions, either, values

MANY = 33  # tensors of an empty call, beside those of one tensor


class Placed(NamedTuple):
    """A block with its functions, and specs of what goes in and comes out."""

    segment: Segment
    functions: BlockFunctions
    inputs: list[tf.TensorSpec]
    outputs: list[tf.TensorSpec]


class TimedBlocks(NamedTuple):
    """Seconds of one pass; ``calls`` of the empty calls between the blocks, with one tensor and with ``MANY``."""

    forward: list[float]
    backward: list[float]
    update: float
    calls: list[tuple[float, float]]

    @property
    def whole(self) -> float:
        """All but the empty calls."""
        return sum(self.forward) + sum(self.backward) + self.update


class _Prepared(NamedTuple):
    """What a pass needs on its device: inputs by value, weights, state and gradients by block, the optimizer's step."""

    given: dict[int, tf.Tensor]
    weights: list[list[tf.Tensor]]
    state: list[list[tf.Tensor]]
    output_gradients: list[list[tf.Tensor]]
    copies: list[keras.Variable]
    update: Callable[[list[Any]], Any]

    @classmethod
    def on(cls, device: str, blocks: Sequence[Placed], updates: bool = True) -> _Prepared:
        """For these blocks, with a step that does nothing unless it ``updates``."""
        made = {value for block in blocks for value in block.segment.writes}
        inputs = [pair for block in blocks for pair in zip(block.segment.reads, block.inputs, strict=True)]
        with tf.device(device):
            variables = _variables(blocks) if updates else []
            copies = [keras.Variable(tf.zeros(each.shape, each.dtype)) for each in variables]
            return cls(
                {value: sample(spec) for value, spec in inputs if value not in made},
                [values(block.segment.trainable_variables) for block in blocks],
                [values(block.segment.non_trainable_variables) for block in blocks],
                [block.functions.ones(block.outputs) for block in blocks],
                copies,
                _update(blocks, copies),
            )


def untimed_pass(blocks: Sequence[Placed], device: str) -> Callable[[], None]:
    """A function that makes one pass in one call, so that Python's lock does not delay the thread that is timed."""
    call, update = _joined(blocks, device, updates=True)

    def once() -> None:
        with tf.device(device):
            gradients, _ = call()
            update(gradients)
        finish(device)  # calls of another process would queue up there, and keep it busy long after

    return once


def joined_pass(blocks: Sequence[Placed], device: str) -> Callable[[], float]:
    """A function that makes one pass without the update in one call, in seconds, on a device of this process.

    Neighbouring blocks share kernels there, as in a stage.
    """
    call, _ = _joined(blocks, device, updates=False)

    def once() -> float:
        with tf.device(device):
            return seconds_of(call)

    return once


def _joined(
    blocks: Sequence[Placed], device: str, updates: bool
) -> tuple[Callable[[], Any], Callable[[list[Any]], Any]]:
    """All forwards and backwards as one call, which gives the weights' gradients first; and the update by these."""
    given, weights, state, output_gradients, _, update = _Prepared.on(device, blocks, updates)

    def run() -> tuple[list[Any], list[Any]]:
        known = dict(given)
        saved: list[Any] = []
        by_weight: list[Any] = []
        by_input: list[Any] = []
        for n, block in enumerate(blocks):
            inputs = [known[value] for value in block.segment.reads]
            outputs, residuals = block.functions.forward(weights[n], state[n], inputs)
            known.update(zip(block.segment.writes, outputs, strict=True))
            saved.append(residuals)
        before = tf.nest.flatten(outputs)
        for n in range(len(blocks) - 1, -1, -1):
            # In a stage a backward needs the next one's gradients; without that, many would run at once.
            with tf.control_dependencies(before):
                given_gradients = [tf.identity(each) for each in output_gradients[n]]
            gradients, others = blocks[n].functions.backward(weights[n], saved.pop(), given_gradients)
            by_weight[:0] = gradients
            by_input += others
            before = [each for each in (*gradients, *others) if isinstance(each, tf.Tensor)] or before
        return by_weight, by_input  # what is not returned is not computed

    with tf.device(device):
        if not all(block.functions.compiled for block in blocks):
            return direct(tf.function(run, autograph=False).get_concrete_function()), update
        return by_xla(run).call, update


def lone_pass(block: Placed, device: str) -> Callable[[], float]:
    """A function that runs one block by itself, forward and backward, in seconds."""
    given, (weights,), (state,), (output_gradients,), _, _ = _Prepared.on(device, [block], updates=False)
    inputs = [given[value] for value in block.segment.reads]

    def run() -> None:
        _, residuals = block.functions.forward(weights, state, inputs)
        block.functions.backward(weights, residuals, output_gradients)

    def once() -> float:
        with tf.device(device):
            return seconds_of(run)

    return once


def local_pass(blocks: Sequence[Placed], device: str) -> Callable[[], TimedBlocks]:
    """A function that makes one pass and times every call, on a device of this process."""
    last = {value: n for n, block in enumerate(blocks) for value in block.segment.reads}
    given, weights, state, output_gradients, _, update = _Prepared.on(device, blocks)
    with tf.device(device):
        nothing = [_nothing(count, _are_compiled(blocks)) for count in (1, MANY)]

    def once() -> TimedBlocks:
        known = dict(given)
        saved: list[Any] = []
        gradients: list[Any] = []
        calls: list[Any] = []
        forward_s, backward_s = [0.0] * len(blocks), [0.0] * len(blocks)
        with tf.device(device):
            for n, block in enumerate(blocks):
                inputs = [known[value] for value in block.segment.reads]
                start_s = time.perf_counter()
                outputs, residuals = block.functions.forward(weights[n], state[n], inputs)
                forward_s[n] = _since(start_s)
                saved.append(residuals)
                known.update(zip(block.segment.writes, outputs, strict=True))
                for value in block.segment.reads:
                    if last[value] == n:
                        del known[value]
                del inputs, outputs, residuals  # what no backward needs is free for the next block
                calls.append((seconds_of(nothing[0]), seconds_of(nothing[1])))
            for n in range(len(blocks) - 1, -1, -1):
                residuals = saved.pop()
                start_s = time.perf_counter()
                by_weight, _ = blocks[n].functions.backward(weights[n], residuals, output_gradients[n])
                backward_s[n] = _since(start_s)
                gradients[:0] = by_weight
            return TimedBlocks(forward_s, backward_s, seconds_of(lambda: update(gradients)), calls)

    return once


def remote_pass(blocks: Sequence[Placed], device: str) -> Callable[[], TimedBlocks]:
    """A function that makes one pass in one call, timed by the process whose device it is.

    Timed from this process, every call would include the round trip.
    """
    given, weights, state, output_gradients, copies, update = _Prepared.on(device, blocks)
    with tf.device(device):
        seen = tf.Variable(0.0)

    def run() -> tf.Tensor:
        known, times = dict(given), [tf.timestamp()]
        saved: list[Any] = []
        by_weight: list[Any] = []
        for n, block in enumerate(blocks):
            inputs = [known[value] for value in block.segment.reads]
            outputs, residuals = block.functions.forward(*after_time(times[-1], (weights[n], state[n], inputs)))
            times.append(time_of([*outputs, *residuals], seen))
            known.update(zip(block.segment.writes, outputs, strict=True))
            saved.append(residuals)
        for n in range(len(blocks) - 1, -1, -1):
            gradients, others = blocks[n].functions.backward(
                *after_time(times[-1], (weights[n], saved.pop(), output_gradients[n]))
            )
            times.append(time_of([*gradients, *others], seen))
            by_weight[:0] = gradients
        update(after_time(times[-1], by_weight))
        return tf.stack([*times, time_of([copy.value.read_value() for copy in copies], seen)])

    with tf.device(device):
        call = direct(tf.function(run, autograph=False).get_concrete_function())

    def once() -> TimedBlocks:
        with tf.device(device):
            taken = np.diff(tf.nest.flatten(call())[0].numpy()).tolist()
        count = len(blocks)
        return TimedBlocks(taken[:count], taken[count : 2 * count][::-1], taken[-1], [(0.0, 0.0)])

    return once


def after_time(when: tf.Tensor, tensors: Any) -> Any:
    """The same tensors, which are there only after this time, so that what reads them cannot begin earlier."""
    with tf.control_dependencies([when]):
        return tf.nest.map_structure(tf.identity, tensors)


def time_of(tensors: Sequence[tf.Tensor], seen: tf.Variable) -> tf.Tensor:
    """The time when all these tensors are there; waiting for a call alone would wait for its side effects only.

    A number of each is written to a variable: TensorFlow would not compute tensors that nothing reads.
    """
    present = [each for each in tensors if each is not None]
    numbers = [each for each in present if each.dtype.is_floating or each.dtype.is_integer]
    read = [tf.reduce_sum(tf.cast(tf.reshape(each, [-1])[:1], tf.float32)) for each in numbers]
    with tf.control_dependencies([*map(tf.identity, present), seen.assign(tf.add_n([tf.zeros([]), *read]))]):
        return tf.timestamp()


def _are_compiled(blocks: Sequence[Placed]) -> bool:
    """Whether XLA compiles some of them."""
    return any(block.functions.compiled for block in blocks)


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
    gradients = [each for block in blocks for each in block.functions.gradients]
    call = either(apply.get_concrete_function(gradients), _are_compiled(blocks))

    def update(gradients: Any, owner: Any = step) -> Any:  # the call alone does not keep the optimizer's variables
        return call(gradients)

    return update


def sample(spec: tf.TensorSpec) -> tf.Tensor:
    """A tensor like this: normally distributed numbers, or zeros where they are integers."""
    if spec.dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(spec.shape, seed=(0, 0)), spec.dtype)
    return tf.zeros(spec.shape, spec.dtype)


def _nothing(count: int, compiled: bool) -> Callable[[], Any]:
    """A call with a given number of tensors that does nothing."""
    tensors = [tf.constant(0.0)] * count
    call = either(tf.function(lambda *each: each).get_concrete_function(*specs(tensors)), compiled)
    return lambda: call(*tensors)


def seconds_of(call: Callable[[], Any]) -> float:
    """What a call takes on a device of this process until it is done."""
    start_s = time.perf_counter()
    call()
    return _since(start_s)


def _since(start_s: float) -> float:
    tf.test.experimental.sync_devices()
    return time.perf_counter() - start_s
