"""The blocks of a chain by kind: those of one kind compute the same, and are measured once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.functions.split import specs
from pipetrain.compute.graph.blocks import Block, Chain
from pipetrain.compute.graph.input_shapes import Shapes
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.keras_private import is_own
from pipetrain.compute.profiling.block_functions import BlockFunctions, Keeps, values
from pipetrain.compute.profiling.block_passes import Placed, sample
from pipetrain.compute.profiling.operation_count import ONE_CORE, estimated_counts
from pipetrain.compute.profiling.workspace import Workspace, workspace
from pipetrain.plan.roofline import Work, block_profile


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
