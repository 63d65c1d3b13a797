"""The weights of a grid's devices: the model's own, of which each device has those of its part of wide layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.functions.flat_values import WorkerCopies
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_function import LossFunction
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.functions.state import Division
from pipetrain.compute.functions.weight_groups import WeightGroup
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.wide_layers import WideLayer
from pipetrain.compute.grid.pieces import Masks, channels_of, pieces_of
from pipetrain.compute.optimizer.gradient_scaling import SCALE, squared_norm, stepping
from pipetrain.compute.transfers.message import Gradients, sent
from pipetrain.compute.transfers.weights import likes
from pipetrain.schemes.grid import Grid


class GridWeights(Stage):
    """A stage that is the whole model, whose weights and slots go to a grid's devices when training begins.

    They come back when it ends, so that what reads, saves and loads them finds the unsplit model's.

    Args:
        chain: the model.
        wide: the layers whose outputs are divided.
        grid: of the devices.
        devices: their names.
        host: the device of this process, which has the whole.
        optimizer: the compiled one, of which each device takes a clone.
        loss: of the outputs.
    """

    def __init__(
        self,
        chain: Chain,
        wide: Sequence[WideLayer],
        grid: Grid,
        devices: Sequence[str],
        host: str,
        optimizer: keras.optimizers.Optimizer,
        loss: LossFunction,
    ) -> None:
        segment = chain.segment(0, len(chain.blocks))
        super().__init__(segment, host, optimizer, loss, division=Division(1, grid.devices))
        self.grid, self.channels = grid, {layer.block: grid.channels(layer.size) for layer in wide}
        self.pieces = pieces_of(chain, wide, self.channels, loss, grid.devices)
        self._axes = {
            id(weight): (axis, self.channels[layer.block])
            for layer in wide
            for weight, axis in zip(layer.call.weights, layer.axes, strict=True)
        }
        self.scale_factor = float(optimizer.loss_scale_factor or 1.0)
        weights = segment.trainable_variables
        numbers, rule, steps = range(len(weights)), self._groups.own.rule, stepping(optimizer)
        self.groups = [
            WeightGroup(weights, numbers, device, steps, rule, self._untrained, part=partial(self._part, rank))
            for device, rank in zip(devices, [*range(grid.outputs)] * grid.rows, strict=True)
        ]
        self._slot_copies = [WorkerCopies(device) for device in devices]

    @property
    def reads_whole(self) -> bool:
        """Whether a wide layer reads an input of the model: its devices then need all rows of their group."""
        return any(set(piece.reads) & set(self.segment.reads) for piece in self.pieces if piece.wide)

    @property
    def divided(self) -> list[int]:
        """The numbers of the weights of which each device has a part."""
        return [n for n, weight in enumerate(self._groups.originals) if id(weight) in self._axes]

    def _untrained(self) -> list[keras.Variable]:
        """What no gradient reaches; there is none while the groups are made, which may ask."""
        groups = getattr(self, "groups", [])
        return [group.variables[n] for group in groups for n in self._groups.missing]

    def _part(self, rank: int, weight: keras.Variable, value: Any) -> Any:
        """A device's part of a weight, or of a slot of it that has its shape; of all else the whole."""
        if id(weight) not in self._axes or value.shape != weight.shape:
            return value
        axis, channels = self._axes[id(weight)]
        return channels_of(value, axis, channels[rank])

    def load(self, iterations: int = 0, replica: int = 0) -> None:
        """Take weights and state from the model, and what the optimizer has gathered, to the devices."""
        super().load(iterations, replica)
        gathered = {(id(slot.weight), slot.kind): slot.variable for slot in self.slots()}
        (common,) = (part.shared for part in self.parts()) if self.parts() else ([],)
        for number, group in enumerate(self.groups):
            with tf.device(group.device):
                group.load(iterations)
                mine, part = [*group.slots()], partial(self._part, number % self.grid.outputs)
                whole = [tf.convert_to_tensor(gathered[id(slot.weight), slot.kind]) for slot in mine]
                parts = (part(slot.weight, value) for slot, value in zip(mine, whole, strict=True))
                self._slot_copies[number].assign([slot.variable for slot in mine], parts)
                for variable, value in zip(group.part().shared, common, strict=True):
                    variable.assign(tf.convert_to_tensor(value))

    def stored(self) -> list[tf.Tensor]:
        """The weights as ``store`` takes them; what the optimizer has gathered comes back with them."""
        ranks = self.groups[: self.grid.outputs]
        gathered = [{(id(slot.weight), slot.kind): slot.variable for slot in group.slots()} for group in ranks]
        for slot in self.slots():
            slot.variable.assign(self._whole(slot.weight, [each[id(slot.weight), slot.kind] for each in gathered]))
        for part in self.parts():
            for mine, variable in zip(part.shared, ranks[0].part().shared, strict=True):
                mine.assign(_here(variable, self.device))
        variables = [group.variables for group in ranks]
        return [self._whole(weight, parts) for weight, *parts in zip(self._groups.originals, *variables, strict=True)]

    def _whole(self, weight: keras.Variable, parts: Sequence[Any]) -> tf.Tensor:
        """A weight, or a slot of it, from the ranks' parts."""
        there = [_here(each, self.device) for each in parts]
        if id(weight) not in self._axes or there[0].shape.rank != len(weight.shape):
            return there[0]
        with tf.device(self.device):
            return tf.concat(there, self._axes[id(weight)][0])

    def store(self, values: Sequence[tf.Tensor]) -> None:
        """Write the weights, as ``stored`` gave them, into the model; state is the workers'."""
        self._groups.store(values)

    def sorted(self, values: BoundaryTensors, targets: Any) -> tuple[list[Any], Any]:
        """A minibatch's inputs as the step takes them."""
        return list(values.tensors), targets

    def trace(
        self, masks: Sequence[tf.TensorSpec | None], targets: Any = None, unreached: Collection[int] = ()
    ) -> list[tf.TensorSpec | None]:
        """Trace all pieces for any rows; gives the specs of the outputs' masks."""
        self.targets, known = targets, Masks()
        for piece in self.pieces:
            piece.trace(known, targets if piece is self.pieces[-1] else None)
        reached = set[int]()
        for piece in reversed(self.pieces):
            left_out = [n for n, value in enumerate(piece.writes) if value not in reached]
            if piece is not self.pieces[-1] and any(piece.any.segment.returns[n] for n in left_out):
                piece.trace(known, None, left_out)
            reached |= set(piece.reached)
        while self._state.complete():
            pass
        self.gradients_like = self._likes()
        self._groups.missing = [n for n in range(len(self.variables)) if n not in self.gradients_like]
        self.unreached: list[int] = []
        self.is_penalized = any(piece.any.is_penalized for piece in self.pieces)
        return [known.get(value) for value in self.pieces[-1].writes]

    def _likes(self) -> dict[int, Any]:
        """The specs of the whole weights' gradients, by number."""
        found: list[Any] = [None] * len(self.variables)
        for piece in self.pieces:
            for n, like in zip(piece.numbers, piece.any.gradients, strict=True):
                if like is not None and (found[n] is None or not isinstance(like, tf.IndexedSlices)):
                    found[n] = like
        return likes(found, self.variables)

    @property
    def assigned(self) -> list[int]:
        """The numbers of the state's variables that layers assign to."""
        assigned = {id(each) for piece in self.pieces if piece.wide is None for each in piece.any.assigned}
        return [n for n, variable in enumerate(self._state.variables) if id(variable) in assigned]

    @property
    def changed(self) -> list[keras.Variable]:
        """The model's weights that a forward changes."""
        pieces = (piece for piece in self.pieces if piece.wide is None)
        return [self._groups.originals[piece.numbers[n]] for piece in pieces for n in piece.any.changed]

    def apply(self, sums: Sequence[Gradients]) -> None:
        """Update every device's weights, within a function, by the sums that it has."""
        mine = [[each.get(n) for n in group.numbers] for group, each in zip(self.groups, sums, strict=True)]
        divided = set(self.divided)
        norms: list[tuple[tf.Tensor, tf.Tensor]] = []  # of each device: of what all have, and of its parts
        for group, each in zip(self.groups, mine, strict=True) if self.global_clipnorm else ():
            with tf.device(group.device):
                made = self._step.prepared(each, None, self._factor())
                norms.append(
                    (
                        squared_norm([gradient for n, gradient in enumerate(made) if n not in divided]),
                        squared_norm([gradient for n, gradient in enumerate(made) if n in divided]),
                    )
                )
        for number, (group, each) in enumerate(zip(self.groups, mine, strict=True)):
            there = self._norms(number, norms) if norms else []
            with tf.device(group.device):
                group.update.apply(self._step.prepared(each, tf.stack(there) if there else None, self._factor()), None)

    def _norms(self, number: int, norms: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> list[tf.Tensor]:
        """On a device, the squared norm of what all have and those of all parts."""
        group, mine = self.grid.group(number // self.grid.outputs), self.groups[number].device
        return [norms[number][0], *(sent(norms[each][1], self.groups[each].device, mine, []) for each in group)]

    def _factor(self) -> Any:
        return tf.constant(self.scale_factor, SCALE.dtype) if self._step.scale is not None else None


def _here(variable: Any, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.identity(tf.convert_to_tensor(variable))
