"""A model as pieces that follow each other: single wide layers, whose outputs are divided, and all that is between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.cores import HOST
from pipetrain.compute.functions.graph_rewrite import sharing_constants, unpacker
from pipetrain.compute.functions.kernels import Kernels
from pipetrain.compute.functions.split import SplitFunction, specs
from pipetrain.compute.functions.stage_function import LossFunction, StageFunction
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.functions.state import Division, State
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.graph.wide_layers import WideLayer
from pipetrain.compute.transfers.message import Record, in_order, sent
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
        return specs(self.halves.forward.structured_outputs[0][0].masks)

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
    with tf.device(HOST):
        x = keras.Input(read.shape[1:], dtype=read.dtype)
        segment = Chain(keras.Model(x, layer.narrowed(width)(x))).segment(0, 1)
    segment.differentiable = list(whole.differentiable)
    return segment


Layout = Literal["rows", "channels"]
Parts = list[Any]  # of each device of the group, None for one that has none


class ModelGroup:
    """The devices that have the same rows of a minibatch, some of which each has to itself.

    Args:
        devices: their names.
        counts: how many of the rows are each one's own.
        record: of messages, if there is to be one.

    ``active`` are the numbers of the devices that have rows of their own; of a minibatch without rows the first.
    """

    def __init__(self, devices: Sequence[str], counts: Sequence[int], record: Record | None) -> None:
        self.devices, self._record, self._messages = list(devices), record, 0
        self._starts = [sum(counts[:rank]) for rank in range(len(counts))]
        self._counts, self._total = list(counts), sum(counts)
        self.active = [rank for rank, count in enumerate(counts) if count] or [0]

    @property
    def ranks(self) -> range:
        """The numbers of all devices."""
        return range(len(self.devices))

    def begin(self) -> None:
        """What is sent from now on belongs together."""
        self._messages += 1

    def send(self, make: Callable[[], tf.Tensor], source: int, sink: int, forward: bool) -> tf.Tensor:
        """What is made on one device, on another."""
        with tf.device(self.devices[source]):
            tensor = make()
        there = sent(tensor, self.devices[source], self.devices[sink], [])
        if self.devices[source] != self.devices[sink] and self._record is not None:
            kind: Any = "gather" if forward else "scatter"
            self._record.add(kind, self._messages, self.devices[source], self.devices[sink], there)
        return there

    def rows(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """A device's own rows of what is of all rows; each may be several of the tensor's."""
        size = tensor.shape[0] if tensor.shape[0] is not None else tf.shape(tensor)[0]
        times = size // max(1, self._total)
        start = self._starts[rank] * times
        return tensor[start : start + self._counts[rank] * times]


class Value:
    """A value that a model group has.

    Args:
        group: the devices.
        parts: as it is made, or given.
        channels: each device's channels and the axis on which they are, if it is made so.
        mask: of each device's rows, None for a value without a mask.
        whole: all rows on every device, if they are there already.
    """

    def __init__(
        self,
        group: ModelGroup,
        parts: Parts,
        channels: tuple[int, Sequence[range]] | None = None,
        mask: Parts | None = None,
        whole: Parts | None = None,
    ) -> None:
        self._group, self._parts, self._channels = group, parts, channels
        self.mask: Parts = mask or [None] * len(group.devices)
        self._rows, self._whole = None if channels else parts, whole
        self._by_rows: Parts | None = None  # gradients
        self._by_whole: Parts | None = None

    @property
    def rows(self) -> Parts:
        """Each device's own rows of it."""
        if self._rows is None:
            group, (axis, _) = self._group, self._channels or (0, ())
            group.begin()
            self._rows = [None] * len(group.devices)
            for sink in group.active:
                parts = [group.send(partial(group.rows, self._parts[q], sink), q, sink, True) for q in group.ranks]
                with tf.device(group.devices[sink]):
                    self._rows[sink] = tf.concat(parts, axis)
        return self._rows

    @property
    def whole(self) -> Parts:
        """All of it, on every device."""
        if self._whole is None:
            group = self._group
            sources, axis = (group.ranks, self._channels[0]) if self._channels else (group.active, 0)
            group.begin()
            self._whole = []
            for sink in group.ranks:
                parts = [group.send(partial(tf.identity, self._parts[q]), q, sink, True) for q in sources]
                with tf.device(group.devices[sink]):
                    self._whole.append(tf.concat(parts, axis) if len(parts) > 1 else tf.identity(parts[0]))
        return self._whole

    def add_by_rows(self, gradients: Parts) -> None:
        """Of what had each device's own rows."""
        self._by_rows = self._summed(self._by_rows, gradients)

    def add_by_whole(self, gradients: Parts) -> None:
        """Of what had all of it, on each device in part."""
        self._by_whole = self._summed(self._by_whole, gradients)

    def _summed(self, before: Parts | None, gradients: Parts) -> Parts:
        if before is None:
            return list(gradients)
        total = []
        for device, a, b in zip(self._group.devices, before, gradients, strict=True):
            with tf.device(device):
                total.append(b if a is None else a if b is None else a + b)
        return total

    @property
    def is_reached(self) -> bool:
        """Whether there is a gradient."""
        return self._by_rows is not None or self._by_whole is not None

    def gradient(self) -> Parts:
        """The gradient in the layout in which the value was made."""
        group, found = self._group, None
        if self._by_whole is not None:
            of_device, sinks = self._by_whole, group.ranks if self._channels else group.active
            group.begin()
            found = [None] * len(group.devices)
            for sink in sinks:
                parts = [group.send(partial(self._part, of_device[q], sink), q, sink, False) for q in group.ranks]
                with tf.device(group.devices[sink]):
                    found[sink] = in_order(parts)
        if self._by_rows is None:
            return found or []
        if not self._channels:
            return self._summed(found, self._by_rows)
        by_rows = self._by_rows
        group.begin()
        exchanged: Parts = []
        for sink in group.ranks:
            parts = [group.send(partial(self._part, by_rows[q], sink), q, sink, False) for q in group.active]
            with tf.device(group.devices[sink]):
                exchanged.append(tf.concat(parts, 0) if len(parts) > 1 else parts[0])
        return self._summed(found, exchanged)

    def _part(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """What a device made of the value: its rows or its channels."""
        if not self._channels:
            return self._group.rows(tensor, rank)
        axis, channels = self._channels
        return channels_of(tensor, axis, channels[rank])


def channels_of(tensor: tf.Tensor, axis: int, own: range) -> tf.Tensor:
    """These channels of a tensor that has all of them on an axis."""
    return tensor[(slice(None),) * axis + (slice(own.start, own.stop),)]
