"""The temporary memory of a block's kernels while they run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.split import size_bytes, specs
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.profiling.block_functions import BlockFunctions, values
from pipetrain.compute.profiling.block_passes import sample
from pipetrain.compute.tensorflow_private import gpu_options

BACKWARD = "workspace_backward"  # under which name a step's backward is
SMALL = 0.05  # kernels' own, as a part of what goes in, that is taken to go with the rows
FAILURES = (tf.errors.OpError, RuntimeError, TypeError, ValueError)


class Workspace(NamedTuple):
    """Peak bytes of a block other than its inputs, outputs, residuals and gradients.

    ``whole_bytes`` for a minibatch, ``row_bytes`` for one row of it. They may be the same: a convolution may allocate
    memory for as many unfolded images as the processor's cache holds, however few there are.
    """

    whole_bytes: int
    row_bytes: int


class _Used(NamedTuple):
    """Bytes of the largest kernel without its outputs; of a backward's peak; of the gradients at that peak."""

    kernel_bytes: int
    backward_bytes: int
    gradient_bytes: int

    @property
    def beside_bytes(self) -> int:
        """The bytes that are neither outputs nor gradients."""
        return max(self.kernel_bytes, self.backward_bytes - self.gradient_bytes)


def workspace(
    functions: BlockFunctions, segment: Segment, inputs: Sequence[tf.TensorSpec], rows: int, device: str
) -> Workspace:
    """The workspace of a block with inputs like these, of so many rows.

    It is taken from TensorFlow's statistics of a step's allocations, on any device and with any kernels; for another
    process's device, from a device of the same kind in this process. It is 0 where there are no statistics: for a block
    that holds resources.
    """
    try:
        used = _used(functions, segment, inputs, device)
    except FAILURES:
        return Workspace(0, 0)
    whole = used.beside_bytes
    if used.kernel_bytes <= SMALL * sum(map(size_bytes, inputs)):
        return Workspace(whole, math.ceil(whole / rows))
    try:
        first = [_first_row(spec, symbol, rows) for spec, symbol in zip(inputs, segment.inputs, strict=True)]
        return Workspace(whole, _used(BlockFunctions(segment, first), segment, first, device).beside_bytes)
    except FAILURES:
        return Workspace(whole, whole)


def _first_row(spec: tf.TensorSpec, symbol: Any, rows: int) -> tf.TensorSpec:
    """One row's part of a tensor; ValueError where its first dimension is not the batch's."""
    if not spec.shape.rank or symbol.shape[0] is not None or spec.shape[0] % rows:
        raise ValueError(spec)
    return tf.TensorSpec([spec.shape[0] // rows, *spec.shape[1:]], spec.dtype)


def _used(functions: BlockFunctions, segment: Segment, inputs: Sequence[tf.TensorSpec], device: str) -> _Used:
    weights, state = values(segment.trainable_variables), values(segment.non_trainable_variables)
    given = [sample(spec) for spec in inputs]
    outputs, _ = functions.forward(weights, state, given)
    arguments = [weights, state, given, functions.ones(specs(outputs))]
    with tf.device(None):  # it runs in another place than what is measured
        step = tf.function(_step(functions), autograph=False).get_concrete_function(*arguments)
    account = _account(step, tf.nest.flatten(arguments), device)
    kernels = (used.peak_bytes - used.live_bytes for node in account for used in node.memory)
    backward = accumulate(size for _, size in sorted(_allocations(account)))
    return _Used(max(kernels, default=0), max(backward, default=0), sum(map(size_bytes, specs(step.outputs))))


def _step(functions: BlockFunctions) -> Any:
    def step(weights: list[Any], state: list[Any], inputs: list[Any], output_gradients: list[Any]) -> list[Any]:
        outputs, residuals = functions.forward(weights, state, inputs)
        with tf.control_dependencies([*outputs, *residuals]):
            residuals, output_gradients = [*map(tf.identity, residuals)], [*map(tf.identity, output_gradients)]
        with tf.name_scope(BACKWARD):
            gradients = tf.nest.flatten(
                functions.backward(weights, residuals, output_gradients), expand_composites=True
            )
        return [gradient for gradient in gradients if gradient is not None]

    return step


def _config() -> Any:
    """The kernels' threads are those that all devices of this process have; operations run one at a time.

    GPUs are used as in the rest of the process: TensorFlow refuses other logical devices, and puts on a CPU what is to
    run on a GPU that a session does not have.
    """
    return tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=1,
        use_per_session_threads=True,
        allow_soft_placement=True,
        gpu_options=gpu_options(),
    )


def _account(step: Any, arguments: Sequence[tf.Tensor], device: str) -> list[Any]:
    """The allocations of each operation of the step, with times, in its second run: the first one chooses kernels."""
    graph, spec = tf.Graph(), tf.DeviceSpec.from_string(device)
    here = f"{spec.device_type}:{0 if spec.device_type == 'CPU' else spec.device_index}"
    with graph.as_default(), tf.device(here):
        tf.graph_util.import_graph_def(step.graph.as_graph_def(), name="")
    pairs = zip(step.inputs, [*arguments, *step.captured_inputs], strict=True)
    feed = {graph.get_tensor_by_name(symbol.name): value.numpy() for symbol, value in pairs}
    wanted = [graph.get_operation_by_name(output.op.name) for output in step.outputs]
    options, told = tf.compat.v1.RunOptions, tf.compat.v1.RunMetadata()
    with tf.compat.v1.Session(graph=graph, config=_config()) as session:
        session.run(wanted, feed)
        session.run(wanted, feed, options(trace_level=options.SOFTWARE_TRACE), told)
    return [node for each in told.step_stats.dev_stats for node in each.node_stats if each.device.endswith(here)]


def _allocations(account: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The times and bytes of a backward's allocations; frees are negative, and first within a microsecond."""
    for node in account:
        if node.node_name.startswith(BACKWARD):
            for used in node.memory:
                yield from ((record.alloc_micros, record.alloc_bytes) for record in used.allocation_records)
