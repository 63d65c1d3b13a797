"""A model as pieces that follow each other: single wide layers, whose outputs are divided, and all that is between."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import sharing_constants, unpacker
from pipetrain.compute.functions.kernels import Kernels
from pipetrain.compute.functions.split import SplitFunction
from pipetrain.compute.functions.stage_function import LossFunction, StageFunction
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.functions.state import Division, State
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.graph.wide_layers import WideLayer
from pipetrain.compute.transfers.weights import placed

Masks = dict[int, Any]  # by value, where there is one


class PieceResult(NamedTuple):
    """What a piece's forward on one device gives, and what its backward there needs."""

    output: BoundaryTensors
    loss: Any
    penalty: Any
    state: list[Any]
    weights: list[Any]
    kept: tuple[Any, ...]


class TracedSegment:
    """A segment's forward and backward, traced once, which run on any device.

    Args:
        segment: the layers.
        loss: that of the last piece.
        division: of a minibatch.
    """

    def __init__(self, segment: Segment, loss: LossFunction | None, division: Division) -> None:
        self.segment, self._loss = segment, loss
        self._state, self._kernels = State(segment, True, division), Kernels()
        self._function: Any = None
        self._halves: SplitFunction | None = None
        self._captured: dict[tuple[int, str], list[Any]] = {}

    @property
    def halves(self) -> SplitFunction:
        """Of the last trace."""
        assert self._halves is not None  # asked for only after it
        return self._halves

    def trace(self, masks: Sequence[Any], targets: Any, unreached: Collection[int] = ()) -> None:
        """Trace them for inputs with these masks; the loss depends on no ``unreached`` output."""
        self._function = StageFunction(self.segment, self._loss, self._state, self._kernels, masks, targets, unreached)
        self._halves = self._function.halves()
        self._captured = {}

    @property
    def output_masks(self) -> list[Any]:
        """Specs of the masks of what it makes."""
        masks = self.halves.forward.structured_outputs[0][0].masks
        return [None if mask is None else tf.TensorSpec(mask.shape, mask.dtype) for mask in masks]

    @property
    def gradients(self) -> list[Any]:
        """The weights' gradients in the trace, None where there is none."""
        return list(self.halves.backward.structured_outputs[0])

    @property
    def is_penalized(self) -> bool:
        """Whether a layer adds a loss of its own."""
        return self.halves.forward.structured_outputs[0][2] is not None

    @property
    def state(self) -> list[keras.Variable]:
        """The variables that are no trained weights."""
        return self._state.variables

    @property
    def assigned(self) -> list[keras.Variable]:
        """Those of the state that layers assign to."""
        return [self._state.variables[n] for n in self._function.assigned]

    @property
    def changed(self) -> list[int]:
        """The numbers of the weights that layers assign to."""
        return list(self._function.changed)

    def returned(self, unreached: Collection[int]) -> list[int]:
        """The numbers of the outputs that want a gradient."""
        returns = enumerate(self.segment.returns)
        return [] if self._loss else [n for n, flows in returns if flows and n not in unreached]

    def forward(
        self, device: str, weights: Sequence[Any], state: Sequence[Any], values: BoundaryTensors, y: Any
    ) -> PieceResult:
        """Run it there."""
        given = self._function.arguments(values, y)
        ran, kept = self._run(self.halves.forward, device, list(weights), list(state), *given)
        output, loss, penalty, (after, left) = ran
        fixed = [state[n] for n in self.halves.fixed]
        residuals = self._kernels.packing.unpack(kept, self.halves.residuals)
        return PieceResult(output, loss, penalty, after, left, (list(weights), residuals, fixed))

    def backward(self, device: str, ran: PieceResult, starts: Sequence[tf.Tensor]) -> tuple[list[Any], list[tf.Tensor]]:
        """The gradients of the weights, and of the inputs that a gradient reaches."""
        made: tuple[list[Any], list[tf.Tensor]] = self._run(self.halves.backward, device, *ran.kept, list(starts))
        return made

    def _run(self, concrete: Any, device: str, *arguments: Any) -> Any:
        flat: list[tf.Tensor] = []
        unpacker(concrete.structured_input_signature[0])(arguments, flat)
        key = id(concrete), device
        if key not in self._captured:
            with tf.init_scope():
                self._captured[key] = [placed(each, device) for each in concrete.captured_inputs]
        graph = tf.compat.v1.get_default_graph()
        flat += [graph.capture(each) for each in self._captured[key]]
        with tf.device(device):  # not a call, which would begin with the last input and end with the last output
            return sharing_constants(concrete, flat)


class Piece:
    """A wide layer, or a run of blocks between wide layers.

    ``traced`` are its functions by the outputs that a device has of the wide layer, by 0 where it is none. ``reads``
    and ``writes`` are values of the chain, ``numbers`` its weights among all that the model trains.
    """

    def __init__(self, wide: WideLayer | None, traced: Mapping[int, TracedSegment], numbers: Sequence[int]) -> None:
        self.wide, self.traced, self.numbers = wide, dict(traced), list(numbers)
        self.any = next(iter(self.traced.values()))
        if wide is None:
            self.reads, self.writes = self.any.segment.reads, self.any.segment.writes
        else:
            self.reads, self.writes = list(wide.call.reads), list(wide.call.writes)
        self.unreached: set[int] = set()

    def trace(self, masks: Masks, targets: Any, unreached: Collection[int] = ()) -> None:
        """Trace its functions, and say which masks its values have."""
        self.unreached = set(unreached)
        given = [None if self.wide else masks.get(value) for value in self.reads]
        for each in self.traced.values():
            each.trace(given, targets, unreached)
        if self.wide is None:
            masks |= dict(zip(self.writes, self.any.output_masks, strict=True))
        elif self.passes_mask:
            masks[self.writes[0]] = masks.get(self.reads[0])

    @property
    def passes_mask(self) -> bool:
        """Whether what the wide layer makes has the mask of what it reads."""
        return self.wide is not None and bool(self.wide.call.operation.supports_masking)

    @property
    def reached(self) -> list[int]:
        """The values among its inputs that a gradient reaches."""
        flows = (value for value, flow in zip(self.reads, self.any.segment.differentiable, strict=True) if flow)
        return [value for value, is_reached in zip(flows, self.any.halves.reached, strict=True) if is_reached]

    @property
    def returned(self) -> list[int]:
        """The values that it makes which want a gradient."""
        return [self.writes[n] for n in self.any.returned(self.unreached)]


def pieces_of(
    chain: Chain,
    wide: Sequence[WideLayer],
    channels: Mapping[int, Sequence[range]],
    loss: LossFunction,
    devices: int,
) -> list[Piece]:
    """The pieces, of which the last computes the loss, though it may have no block.

    ``channels`` are each rank's of every wide layer, by its block.
    """
    division = Division(1, devices)
    numbers = {id(each): n for n, each in enumerate(chain.segment(0, len(chain.blocks)).trainable_variables)}
    pieces: list[Piece] = []

    def between(first: int, end: int) -> None:
        is_last = end == len(chain.blocks)
        if first < end or is_last:
            segment = chain.apart(first, end)
            mine = [numbers[id(each)] for each in segment.trainable_variables]
            pieces.append(Piece(None, {0: TracedSegment(segment, loss if is_last else None, division)}, mine))

    first = 0
    for layer in wide:
        between(first, layer.block)
        widths = dict.fromkeys(map(len, channels[layer.block]))
        parts = {width: TracedSegment(_narrow(chain, layer, width), None, division) for width in widths}
        pieces.append(Piece(layer, parts, [numbers[id(each)] for each in layer.call.weights]))
        first = layer.block + 1
    between(first, len(chain.blocks))
    return pieces


def _narrow(chain: Chain, layer: WideLayer, width: int) -> Segment:
    """A device's part of a wide layer."""
    whole = chain.apart(layer.block, layer.block + 1)
    (read,) = whole.inputs
    with tf.device("/device:CPU:0"):
        x = keras.Input(read.shape[1:], dtype=read.dtype)
        segment = Chain(keras.Model(x, layer.narrowed(width)(x))).segment(0, 1)
    segment.differentiable = list(whole.differentiable)
    return segment
