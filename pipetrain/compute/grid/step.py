"""One training step over a grid of devices, as one function that TensorFlow runs on all of them, group by group.

Every device computes its part of each wide layer for all rows of its model group, and all other layers for its own
rows. Gradients of a wide layer's part are summed over the devices that have it, those of other weights over all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from pipetrain.compute.functions.backward import over_stages
from pipetrain.compute.functions.flat_values import packing_captures
from pipetrain.compute.functions.split import specs
from pipetrain.compute.functions.stage_function import as_mean
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.grid.pieces import ModelGroup, Piece, PieceResult, Value
from pipetrain.compute.grid.weights import GridWeights
from pipetrain.compute.transfers.message import Order, Record, RecordedMessage, reduced, sent
from pipetrain.compute.transfers.step import Rows, StepResult, collected
from pipetrain.compute.transfers.weights import Shares, Worker, penalty_starts, starts_of
from pipetrain.schemes.transfers.plan import Pack, Phase


class GroupRun:
    """A model group's part of a step.

    ``gradients`` are each device's, by number; ``state`` and ``left`` what layers have left of state and weights;
    ``losses``, ``penalties`` and ``outputs`` what was made on which device.

    Args:
        weights: of all devices, with the pieces.
        workers: all devices, each with its state.
        group: the devices.
        numbers: theirs among all.
        given: of each device its inputs, its targets and its shares.
        share: of the minibatch's rows.
    """

    def __init__(
        self,
        weights: GridWeights,
        workers: Sequence[Worker],
        group: ModelGroup,
        numbers: Sequence[int],
        given: Mapping[int, Any],
        share: float,
    ) -> None:
        self._weights, self._group, self._numbers, self._given, self._share = weights, group, [*numbers], given, share
        self._values: dict[int, Value] = {}
        self._ran: list[dict[int, PieceResult]] = []
        self.gradients: dict[int, dict[int, Any]] = {n: {} for n in numbers}
        self.state = {n: self._read(workers[n]) for n in numbers}
        self.assigned: set[int] = set()
        self.left: dict[int, dict[int, Any]] = {}
        self.losses: list[tuple[str, Any]] = []
        self.penalties: list[tuple[str, Any]] = []
        self.outputs: list[tuple[str, BoundaryTensors]] = []
        self._tensors = [self._read_weights(n) for n in numbers]
        self._give()

    @staticmethod
    def _read(worker: Worker) -> dict[int, Any]:
        return {id(variable): value for variable, value in zip(worker.state, worker.read(), strict=True)}

    def _read_weights(self, number: int) -> list[tf.Tensor]:
        group = self._weights.groups[number]
        with tf.device(group.device):
            return [variable.value.read_value() for variable in group.variables]

    def _give(self) -> None:
        """The model's inputs, of which every device has its own rows, or all of the group."""
        for place, value in enumerate(self._weights.segment.reads):
            given = [self._given[n][0][place] if n in self._given else None for n in self._numbers]
            if not self._weights.reads_whole:
                self._values[value] = Value(self._group, given)
                continue
            rows: list[Any] = [None] * len(given)
            for rank in self._group.active:
                with tf.device(self._group.devices[rank]):
                    rows[rank] = self._group.rows(given[rank], rank)
            self._values[value] = Value(self._group, rows, whole=given)

    def forward(self) -> None:
        """Run all pieces."""
        for piece in self._weights.pieces:
            self._ran.append(self._forward_wide(piece) if piece.wide else self._forward_rows(piece))

    def _forward_wide(self, piece: Piece) -> dict[int, PieceResult]:
        assert piece.wide is not None
        read, channels = self._values[piece.reads[0]], self._weights.channels[piece.wide.block]
        ran = {}
        for rank, whole in enumerate(read.whole):
            weights = [self._tensors[rank][n] for n in piece.numbers]
            values = BoundaryTensors([whole], [None])
            ran[rank] = piece.traced[len(channels[rank])].forward(self._group.devices[rank], weights, [], values, None)
            self._note_penalty(rank, ran[rank], self._share)
        made = [each.output.tensors[0] for each in ran.values()]
        mask = read.mask if piece.passes_mask else None
        self._values[piece.writes[0]] = Value(self._group, made, (piece.wide.axis, channels), mask)
        return ran

    def _forward_rows(self, piece: Piece) -> dict[int, PieceResult]:
        ran, traced = {}, piece.any
        read = [self._values[value] for value in piece.reads]
        is_last = piece is self._weights.pieces[-1]
        for rank in self._group.active:
            number, device = self._numbers[rank], self._group.devices[rank]
            _, targets, shares = self._given[number]
            weights = [self._current(rank, n) for n in piece.numbers]
            state = [self.state[number][id(variable)] for variable in traced.state]
            values = BoundaryTensors([each.rows[rank] for each in read], [each.mask[rank] for each in read])
            ran[rank] = each = traced.forward(device, weights, state, values, targets if is_last else None)
            self._keep(piece, rank, each)
            self._note_penalty(rank, each, shares.penalty)
            if is_last:
                with tf.device(device):
                    self.losses.append((device, tf.cast(each.loss, tf.float32) * shares.loss))
                self.outputs.append((device, each.output))
        for place, value in enumerate(piece.writes if not is_last else ()):
            parts = [ran[rank].output.tensors[place] if rank in ran else None for rank in self._group.ranks]
            masks = [ran[rank].output.masks[place] if rank in ran else None for rank in self._group.ranks]
            self._values[value] = Value(self._group, parts, mask=masks)
        return ran

    def _current(self, rank: int, number: int) -> tf.Tensor:
        """A weight as layers so far have left it."""
        left = self.left.get(self._numbers[rank], {})
        return left.get(number, self._tensors[rank][number])

    def _keep(self, piece: Piece, rank: int, ran: PieceResult) -> None:
        """What layers assign."""
        number = self._numbers[rank]
        variables = piece.any.assigned
        self.assigned |= {id(variable) for variable in variables}
        self.state[number] |= {id(variable): value for variable, value in zip(variables, ran.state, strict=True)}
        if piece.any.changed:
            numbers = [piece.numbers[n] for n in piece.any.changed]
            self.left.setdefault(number, {}).update(zip(numbers, ran.weights, strict=True))

    def _note_penalty(self, rank: int, ran: PieceResult, share: Any) -> None:
        if ran.penalty is not None:
            device = self._group.devices[rank]
            with tf.device(device):
                self.penalties.append((device, tf.cast(as_mean(ran.penalty, share), tf.float32) * share))

    def backward(self) -> None:
        """Differentiate all pieces, the last one first."""
        for piece, ran in zip(reversed(self._weights.pieces), reversed(self._ran), strict=True):
            self._backward(piece, ran)

    def _backward(self, piece: Piece, ran: Mapping[int, PieceResult]) -> None:
        made = self._of_outputs(piece)
        by_input: dict[int, list[Any]] = {value: [None] * len(self._numbers) for value in piece.reached}
        for rank, each in ran.items():
            device, number = self._group.devices[rank], self._numbers[rank]
            width = len(self._weights.channels[piece.wide.block][rank]) if piece.wide else 0
            traced = piece.traced[width]
            outputs = dict(zip(piece.writes, each.output.tensors, strict=True))
            with tf.device(device):
                starts = self._starts(piece, traced.halves.outputs, number, made, rank, outputs)
            by_weight, inputs = traced.backward(device, each, starts)
            for n, gradient in zip(piece.numbers, by_weight, strict=True):
                with tf.device(device):
                    total = over_stages(self.gradients[number].get(n), gradient)
                if total is not None:
                    self.gradients[number][n] = total
            for value, gradient in zip(piece.reached, inputs, strict=True):
                by_input[value][rank] = gradient
        for value, gradients in by_input.items():
            if piece.wide:
                self._values[value].add_by_whole(gradients)
            else:
                self._values[value].add_by_rows(gradients)

    def _starts(
        self,
        piece: Piece,
        specs: Sequence[tf.TensorSpec],
        number: int,
        made: Mapping[int, list[Any]],
        rank: int,
        outputs: Mapping[int, tf.Tensor],
    ) -> list[tf.Tensor]:
        """The gradients of all that a piece's backward starts from, on one device."""
        scale = self._weights.scale_factor
        shares = Shares(1.0, self._share) if piece.wide else self._given[number][2]
        if piece is self._weights.pieces[-1]:
            return starts_of(specs, shares, scale)
        found = [made[value][rank] if value in made else tf.zeros_like(outputs[value]) for value in piece.returned]
        return [*found, *penalty_starts(specs[len(found) :], shares, scale)]

    def _of_outputs(self, piece: Piece) -> dict[int, list[Any]]:
        """The gradients of the values that a piece makes, as it made them."""
        values = {value: self._values[value] for value in piece.returned}
        return {value: each.gradient() for value, each in values.items() if each.is_reached}


class GridStep:
    """The step's functions, one for each number of rows that minibatches have.

    Args:
        weights: of all devices, whose pieces have been traced.
        workers: the devices, each with its state.
        host: this process's device, to which results come.
    """

    is_late = waits = False  # no gradients are left to the next step

    def __init__(self, weights: GridWeights, workers: Sequence[Worker], host: str) -> None:
        self.weights, self.workers, self.host = weights, list(workers), host
        self._like = specs(weights.segment.inputs), weights.targets
        self._functions: dict[Any, Any] = {}
        self._sent: dict[Any, list[RecordedMessage]] = {}

    def __call__(self, rows: Sequence[Rows], pending: bool, records: bool) -> tuple[StepResult, list[RecordedMessage]]:
        """One step, and the messages that were recorded if it ``records`` them."""
        given = {each.worker: (*each.inputs, each.shares) for each in rows}
        counts = self._counts(given)
        key = counts, records
        if key not in self._functions:
            record = Record() if records else None
            function = tf.function(packing_captures(partial(self._body, counts, record)), autograph=False)
            like = tf.nest.map_structure(
                _with_rows, given, {n: (*self._like, Shares(*[tf.TensorSpec([])] * 2)) for n in given}
            )
            self._functions[key] = function.get_concrete_function(like)
            self._sent[key] = record.messages if record else []
        result: StepResult = self._functions[key](given)
        return result, self._sent[key]

    def _counts(self, given: Mapping[int, Any]) -> tuple[int, ...]:
        """How many rows are each device's own."""
        grid = self.weights.grid
        every = grid.outputs if self.weights.reads_whole else 1
        return grid.counts(sum(int(each[0][0].shape[0]) for n, each in given.items() if n % every == 0))

    def at(self, updates: int) -> None:
        """All steps are alike."""

    def prepare(self) -> None:
        """Nothing is returned to workers."""

    def flush(self) -> None:
        """Nothing waits for a next step."""

    def _body(self, counts: Sequence[int], record: Record | None, given: Mapping[int, Any]) -> StepResult:
        grid, devices = self.weights.grid, [worker.device for worker in self.workers]
        runs = []
        for part in range(grid.rows):
            numbers = grid.group(part)
            own = [counts[n] for n in numbers]
            if any(own) or (not part and not any(counts)):  # of a minibatch without rows the first has these
                group = ModelGroup([devices[n] for n in numbers], own, record)
                mine = {n: given[n] for n in numbers if n in given}
                share = sum(own) / sum(counts) if any(own) else 1.0
                runs.append(GroupRun(self.weights, self.workers, group, numbers, mine, share))
        for run in runs:
            run.forward()
        for run in runs:
            run.backward()
        self._assign(runs)
        self.weights.apply(self._sums(runs, record))
        return collected(
            self.host,
            [each for run in runs for each in run.losses],
            [each for run in runs for each in run.penalties],
            [each for run in runs for each in run.outputs],
            record,
        )

    def _assign(self, runs: Sequence[GroupRun]) -> None:
        """What layers assign: to state on the same device, to weights on all, by the first where nothing was run."""
        left: dict[int, dict[int, Any]] = {}
        for run in runs:
            for n, state in run.state.items():
                worker = self.workers[n]
                numbers = [k for k, variable in enumerate(worker.state) if id(variable) in run.assigned]
                worker.assign(numbers, [state[id(worker.state[k])] for k in numbers])
            left |= run.left
        for number, (worker, group) in enumerate(zip(self.workers, self.weights.groups, strict=True)):
            source = number if number in left else next(iter(left), number)
            for n, value in left.get(source, {}).items():
                there = sent(value, self.workers[source].device, worker.device, [])
                with tf.device(worker.device):
                    group.variables[n].assign(there)

    def _sums(self, runs: Sequence[GroupRun], record: Record | None) -> list[dict[int, Any]]:
        """Of every device, the gradients' sums."""
        grid, like, divided = self.weights.grid, self.weights.gradients_like, set(self.weights.divided)
        devices = [worker.device for worker in self.workers]
        gradients = {n: each for run in runs for n, each in run.gradients.items()}
        sums: list[dict[int, Any]] = [{} for _ in devices]
        common = [n for n in like if n not in divided]
        made = [(devices[n], each) for n, each in gradients.items() if any(k in each for k in common)]
        for found, each in zip(sums, _reduced(record, made, devices, common, like), strict=True):
            found.update(each)
        for rank in range(grid.outputs):
            numbers = grid.batch_group(rank)
            on = [devices[n] for n in numbers]
            mine = {k: self._part_like(rank, k) for k in like if k in divided}
            made = [(devices[n], gradients[n]) for n in numbers if n in gradients]
            for n, each in zip(numbers, _reduced(record, made, on, list(mine), mine), strict=True):
                sums[n].update(each)
        return sums

    def _part_like(self, rank: int, number: int) -> tf.TensorSpec:
        variable = self.weights.groups[rank].variables[number]
        return tf.TensorSpec(variable.shape, self.weights.gradients_like[number].dtype)


def _reduced(
    record: Record | None, made: Sequence[Any], sinks: Sequence[str], numbers: Sequence[int], like: Mapping[int, Any]
) -> list[dict[int, Any]]:
    """Each weight's sum as it is ready, one message for each."""
    if not numbers:
        return [{} for _ in sinks]
    phase = Phase(tuple(Pack((n,), 0) for n in reversed(numbers)), 0)
    return reduced(Order(phase, "push", record), made, sinks, {n: like[n] for n in numbers})


def _with_rows(tensor: tf.Tensor | None, like: tf.TensorSpec | None) -> tf.TensorSpec | None:
    """A spec with the tensor's own number of rows."""
    if tensor is None or like is None:
        return None
    return tf.TensorSpec([*tensor.shape[:1], *like.shape[1:]], like.dtype)
