"""The blocks of a chain by kind: those of one kind compute the same, and their time and memory are measured once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.functions.split import size_bytes, specs
from pipetrain.compute.graph.blocks import Block, Chain
from pipetrain.compute.graph.inputs import Shapes
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.keras_private import is_own
from pipetrain.compute.profiling.block_functions import BlockFunctions, Keeps, values
from pipetrain.compute.profiling.block_passes import Placed, sample
from pipetrain.compute.profiling.operation_count import ONE_CORE, estimated_counts
from pipetrain.compute.tensorflow_private import gpu_options
from pipetrain.plan.roofline import Work, block_profile

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


class TracedBlock(NamedTuple):
    """The functions of a block that has been run once, and what this has shown."""

    functions: BlockFunctions
    outputs: list[tf.TensorSpec]
    keeps: Keeps


@dataclass
class Kind:
    """Equal blocks: their numbers, the first one alone with specs of what goes in and comes out, its counted work.

    ``label`` is the same for blocks of such layers of any size. ``traced`` is None until ``trace`` is called,
    ``workspace`` until ``weigh`` is.
    """

    blocks: list[int]
    segment: Segment
    inputs: list[tf.TensorSpec]
    outputs: list[tf.TensorSpec]
    work: Work
    label: str
    traced: TracedBlock | None = None
    workspace: Workspace | None = None

    @property
    def estimated_s(self) -> float:
        """What all of them take together, by their counted operations: to compare kinds by."""
        return len(self.blocks) * block_profile(self.work, ONE_CORE).seconds.total_s

    def trace(self) -> TracedBlock:
        """Make its functions, and run the first of the blocks once on the device in scope."""
        if self.traced is None:
            self.traced = _traced(self.segment, self.inputs)
            self.outputs = self.traced.outputs
        return self.traced

    def weigh(self, rows: int, device: str) -> None:
        """Measure the temporary memory of its kernels."""
        if self.workspace is None:
            self.workspace = workspace(self.trace().functions, self.segment, self.inputs, rows, device)


class Kinds:
    """The kinds of a chain's blocks for so many rows, in the chain's order.

    A kind is traced at once if Keras does not know what shapes its outputs have: where the batch is not the first
    dimension throughout, or dimensions are open.

    ``of`` is the kind of each block, ``segments`` each block alone, ``like`` the spec of each value.
    """

    def __init__(self, chain: Chain, rows: int, shapes: Shapes) -> None:
        given = zip(chain.crossing(0), chain.specs(0), shapes, strict=True)
        self.like = {value: _sized(tensor, rows, shape) for value, tensor, shape in given}
        self.segments, works = list(chain.alone()), estimated_counts(chain, rows)
        known: dict[str, Kind] = {}
        self.of: list[Kind] = []
        for index, (block, segment) in enumerate(zip(chain.blocks, self.segments, strict=True)):
            # Keras' own layers do the same wherever they stand; others may hold what their settings do not say.
            own = all(is_own(type(call.operation)) for call in block.calls)
            inputs = [self.like[value] for value in segment.reads]
            key = f"{(own and cost_key(block)) or index}, {segment.differentiable}, {segment.returns}, {inputs}"
            if key not in known:
                label = ", ".join(type(call.operation).__name__ for call in block.calls)
                known[key] = Kind([], segment, inputs, [], works[index], label)
                outputs = _declared(block, segment, inputs, rows)
                known[key].outputs = outputs if outputs is not None else known[key].trace().outputs
            kind = known[key]
            kind.blocks.append(index)
            self.of.append(kind)
            self.like.update(zip(segment.writes, kind.outputs, strict=True))
        self.all = list(known.values())

    @property
    def largest_first(self) -> list[Kind]:
        """Those first whose blocks take longest together, by their counted operations."""
        return sorted(self.all, key=lambda kind: -kind.estimated_s)

    def placed(self, index: int) -> Placed:
        """A block of a kind that is traced."""
        kind, segment = self.of[index], self.segments[index]
        assert kind.traced is not None
        inputs = [self.like[value] for value in segment.reads]
        return Placed(segment, kind.traced.functions, inputs, kind.outputs)


def _traced(segment: Segment, inputs: Sequence[tf.TensorSpec]) -> TracedBlock:
    functions = BlockFunctions(segment, inputs)
    weights, state = values(segment.trainable_variables), values(segment.non_trainable_variables)
    outputs, residuals = functions.forward(weights, state, [sample(spec) for spec in inputs])
    return TracedBlock(functions, specs(outputs), functions.keeps(residuals))


def _declared(block: Block, segment: Segment, inputs: Sequence[tf.TensorSpec], rows: int) -> list[tf.TensorSpec] | None:
    """The outputs as Keras' layers declare them, which have the batch first; None where that is not enough."""
    layers = [call.operation for call in block.calls]
    if not all(isinstance(layer, keras.Layer) and is_own(type(layer)) for layer in layers):
        return None
    if any(not spec.shape.rank or spec.shape[0] != rows for spec in inputs):
        return None
    shapes = [(rows, *symbol.shape[1:]) for symbol in segment.outputs]
    if any(None in shape for shape in shapes) or any(symbol.shape[:1] != (None,) for symbol in segment.outputs):
        return None
    return [tf.TensorSpec(shape, symbol.dtype) for shape, symbol in zip(shapes, segment.outputs, strict=True)]


def cost_key(block: Block) -> str | None:
    """Equal for blocks that compute the same, whatever their names; None if settings cannot be serialized."""
    keys = []
    for call in block.calls:
        try:
            settings = {key: value for key, value in call.operation.get_config().items() if key != "name"}
        except Exception:  # a layer of the user's own, whose arguments Keras cannot write down
            return None
        plain = keras.tree.map_structure(_described, (call.node.arguments.args, call.node.arguments.kwargs))
        kind = type(call.operation)
        # Adapters, and what is frozen, of layers inside a layer are not among its settings.
        trained = [(weight.shape, weight.dtype) for weight in call.weights]
        keys.append((kind.__module__, kind.__qualname__, settings, plain, trained))
    return json.dumps(keys, default=str, sort_keys=True)


def _described(argument: Any) -> Any:
    return (argument.shape, argument.dtype) if hasattr(argument, "shape") else argument


def _sized(tensor: Any, batch_size: int, shape: tuple[int, ...]) -> tf.TensorSpec:
    """The spec of an input of this shape, with the batch size filled in where it is open."""
    return tf.TensorSpec([batch_size if tensor.shape[0] is None else tensor.shape[0], *shape], tensor.dtype)
