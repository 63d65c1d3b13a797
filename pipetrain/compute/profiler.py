"""Measure what each block of a model costs on a device, and leave the model as it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.blocks import Block, Chain
from pipetrain.compute.segment import Segment
from pipetrain.compute.split import SplitFunction, specs, split
from pipetrain.compute.update import Update
from pipetrain.plan.profile import BlockProfile, Profile

REPEATS = 5
MEASURE_S = 0.05  # a figure is the median of at least REPEATS calls and at least this many seconds,
STEADY = 0.03  # and of more until its standard error is this part of it,
AT_MOST_S = 0.5  # or this many seconds are over
PATIENCE_S = 1.0  # the progress bar appears after this long


class _Measured(NamedTuple):
    """One block's figures. ``inner_bytes`` are kept of what only the block knows; of its inputs and outputs, which."""

    forward_s: float
    backward_s: float
    update_s: float
    error_s: float
    inner_bytes: int
    keeps_inputs: list[bool]
    keeps_outputs: list[bool]
    outputs: list[tf.TensorSpec]


def profile(model: keras.Model, batch_size: int, device: str = "CPU:0", verbose: bool = True) -> Profile:
    """Measure every layer's forward and backward seconds, weight bytes, and bytes that cross a cut after it.

    The blocks run one by one on random data (zeros for integer inputs), each figure the median of several calls
    less the time of an empty call; more calls where the machine is not steady, within limits, and the profile's
    ``spread`` says how far that got. Layers of Keras' own with equal settings and shapes are measured once.
    The model's weights, statistics and seeds are read and never written.

    Args:
        model: a Sequential or Functional model.
        batch_size: rows of the minibatch to measure with, at least 1.
        device: the TensorFlow device to measure on.
        verbose: show a progress bar when it takes long.

    Raises:
        ValueError, TypeError: for a model whose layers cannot be seen, or a batch size below 1.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"A profile needs at least one row. Received: batch_size={batch_size!r}. Try batch_size=128.")
    return profile_chain(Chain(model), batch_size, device, verbose)


def profile_chain(chain: Chain, batch_size: int, device: str, verbose: bool) -> Profile:
    """``profile`` of a model whose blocks are known."""
    blocks = chain.blocks
    progress = _Progress(len(blocks) if verbose else 0)
    known: dict[str, _Measured] = {}
    # What each value is like: Keras does not know the shapes where the batch is not the first dimension throughout.
    like = {value: _sized(tensor, batch_size) for value, tensor in zip(chain.crossing(0), chain.specs(0), strict=True)}
    measured: list[BlockProfile] = []
    made: dict[int, int] = {}  # the block that made each value
    kept: dict[int, int] = {}  # the same, of those that some backward reads
    errors_s = 0.0
    with tf.device(device):
        call_s = _empty_call_s()
        for index, (block, segment) in enumerate(zip(blocks, chain.alone(), strict=True)):
            # Keras' own layers cost the same wherever they stand; others may hold what their settings do not say.
            own = all(type(call.operation).__module__.startswith("keras.src.") for call in block.calls)
            inputs = [like[value] for value in segment.reads]
            key = f"{(own and cost_key(block)) or index}, gradients {segment.flows}, {inputs}"
            if key not in known:
                known[key] = _measure(segment, inputs)
            times = known[key]
            errors_s += times.error_s
            like.update(zip(segment.writes, times.outputs, strict=True))
            keeps = [*zip(segment.reads, times.keeps_inputs, strict=True)]
            keeps += zip(segment.writes, times.keeps_outputs, strict=True)
            made.update(dict.fromkeys(segment.writes, index))
            kept.update((value, made[value]) for value, keep in keeps if keep and value in made)
            measured.append(
                BlockProfile(
                    name=block.name,
                    forward_s=max(times.forward_s - call_s, 0.0),
                    backward_s=max(times.backward_s - call_s, 0.0),
                    output_bytes=sum(_size_bytes(like[value]) for value in chain.crossing(index + 1)),
                    weight_bytes=sum(_size_bytes(spec) for spec in specs(segment.trainable_variables)),
                    activation_bytes=times.inner_bytes,
                    update_s=max(times.update_s - call_s, 0.0),
                )
            )
            progress.show(len(measured))
    for value, index in kept.items():
        block = measured[index]
        measured[index] = replace(block, activation_bytes=block.activation_bytes + _size_bytes(like[value]))
    profile = Profile(model=chain.model.name, batch_size=batch_size, blocks=tuple(measured))
    return replace(profile, spread=errors_s / profile.total_s if profile.total_s else 0.0)


def _measure(segment: Segment, like: list[tf.TensorSpec]) -> _Measured:
    weights = [variable.value.read_value() for variable in segment.trainable_variables]
    state = [variable.value.read_value() for variable in segment.non_trainable_variables]
    inputs = [_sample(spec) for spec in like]
    flows = [x for x, flow in zip(inputs, segment.flows, strict=True) if flow]
    constants = [x for x, flow in zip(inputs, segment.flows, strict=True) if not flow]

    traced: dict[str, list[Any]] = {}

    def run(weights: Any, state: Any, flows: Any, constants: Any) -> Any:
        outputs, state, _ = segment.run(weights, state, flows, constants, [None] * len(inputs))
        flowing, still = iter(flows), iter(constants)
        traced.update(inputs=[next(flowing if flow else still) for flow in segment.flows], outputs=outputs)
        return [x for x, returned in zip(outputs, segment.returns, strict=True) if returned], (outputs, state)

    step = split(run, specs(weights), specs(state), specs(flows), specs(constants))
    (outputs, _), residuals = step.forward(weights, state, flows, constants)
    gradients = [tf.ones_like(x) for x, returned in zip(outputs, segment.returns, strict=True) if returned]
    keeps = {tensor.ref(): _size_bytes(tf.TensorSpec(x.shape, x.dtype)) for tensor, x in _numeric(step, residuals)}
    inputs_kept, outputs_kept = ([tensor.ref() in keeps for tensor in traced[which]] for which in ("inputs", "outputs"))
    known = {tensor.ref() for tensor in (*traced["inputs"], *traced["outputs"])}
    forward = _timed(lambda: step.forward(weights, state, flows, constants))
    backward = _timed(lambda: step.backward(weights, residuals, gradients))
    return _Measured(
        forward_s=forward.median_s,
        backward_s=backward.median_s,
        update_s=_update_s(segment.trainable_variables),
        error_s=forward.error_s + backward.error_s,
        inner_bytes=sum(size for ref, size in keeps.items() if ref not in known),
        keeps_inputs=inputs_kept,
        keeps_outputs=outputs_kept,
        outputs=specs(outputs),
    )


def _numeric(step: SplitFunction, residuals: Sequence[tf.Tensor]) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Residuals as the trace knows them, each with its value; what a loop keeps in lists has no size of its own."""
    pairs = zip(step.residuals, residuals, strict=True)
    return [(symbol, value) for symbol, value in pairs if value.dtype not in (tf.variant, tf.resource)]


def _update_s(variables: Sequence[keras.Variable]) -> float:
    """Seconds of one step of SGD with momentum on variables like these."""
    if not variables:
        return 0.0
    copies = [keras.Variable(tf.zeros(variable.shape, variable.dtype)) for variable in variables]
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    optimizer.build(copies)
    update = tf.function(Update(optimizer, copies).apply, autograph=False)
    gradients = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
    return _timed(lambda: update(gradients)).median_s


class _Timing(NamedTuple):
    """Median seconds of a call, and the standard error of this median."""

    median_s: float
    error_s: float


def _timed(call: Callable[[], Any]) -> _Timing:
    call()
    taken: list[float] = []
    while True:
        start = time.perf_counter()
        call()
        tf.test.experimental.sync_devices()
        taken.append(time.perf_counter() - start)
        if len(taken) >= REPEATS and sum(taken) >= MEASURE_S:
            timing = _summary(taken)
            if timing.error_s <= STEADY * timing.median_s or sum(taken) >= AT_MOST_S:
                return timing


def _summary(taken: Sequence[float]) -> _Timing:
    """The median, and its error from the quartiles, which a few calls that were held up do not move.

    ``1.25 * (q3 - q1) / 1.35 / sqrt(n)``, as for normally distributed times.
    """
    first, median, third = np.quantile(taken, (0.25, 0.5, 0.75))
    return _Timing(float(median), float(1.25 * (third - first) / 1.35 / len(taken) ** 0.5))


def _empty_call_s() -> float:
    call = tf.function(lambda x: x).get_concrete_function(tf.TensorSpec([]))
    x = tf.constant(0.0)
    return _timed(lambda: call(x)).median_s


def cost_key(block: Block) -> str | None:
    """Equal for blocks that do the same work, whatever their names; None where Keras cannot tell a layer's settings."""
    keys = []
    for call in block.calls:
        try:
            settings = {key: value for key, value in call.operation.get_config().items() if key != "name"}
        except Exception:  # a layer of the user's own, whose arguments Keras cannot write down
            return None
        plain = keras.tree.map_structure(_described, (call.node.arguments.args, call.node.arguments.kwargs))
        kind = type(call.operation)
        keys.append((kind.__module__, kind.__qualname__, settings, plain))
    return json.dumps(keys, default=str, sort_keys=True)


def _described(argument: Any) -> Any:
    return (argument.shape, argument.dtype) if hasattr(argument, "shape") else argument


def _sized(tensor: Any, batch_size: int) -> tf.TensorSpec:
    """The symbolic tensor's spec with the batch size filled in; other unknown dimensions count as 1."""
    rows = batch_size if tensor.shape[0] is None else tensor.shape[0]
    return tf.TensorSpec([rows, *(size or 1 for size in tensor.shape[1:])], tensor.dtype)


def _sample(spec: tf.TensorSpec) -> tf.Tensor:
    if spec.dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(spec.shape, seed=(0, 0)), spec.dtype)
    return tf.zeros(spec.shape, spec.dtype)


def _size_bytes(spec: tf.TensorSpec) -> int:
    return int(np.prod(spec.shape.as_list(), dtype=np.int64)) * spec.dtype.size


class _Progress:
    """Keras' progress bar, shown only once the work has taken a while."""

    def __init__(self, blocks: int) -> None:
        self._blocks, self._start = blocks, time.perf_counter()
        self._bar: keras.utils.Progbar | None = None

    def show(self, done: int) -> None:
        if not self._blocks or (self._bar is None and time.perf_counter() - self._start < PATIENCE_S):
            return
        if self._bar is None:
            print("Profiling the model's layers")
            self._bar = keras.utils.Progbar(self._blocks, unit_name="layer")
        self._bar.update(done)
