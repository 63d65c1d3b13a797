"""What a program's function is given of a minibatch and its rows, and what it gives of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import is_prompt, is_remote
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.program.stage_trace import Share
from pipetrain.schemes.programs import Program
from pipetrain.schemes.splitting import Parts, RowsPiece

KEPT = 8  # calls whose tensors are kept, by their minibatches' rows: most data have two numbers of them


class Numbers(NamedTuple):
    """One array of numbers on a device: its type and size, and what it is for a minibatch's parts and loss scale.

    ``minibatch`` is the number of that minibatch.
    """

    minibatch: int
    device: str
    dtype: tf.DType
    size: int
    of: Callable[[Parts, float], list[Any]]

    @property
    def spec(self) -> tf.TensorSpec:
        """Of the argument."""
        return tf.TensorSpec([self.size], self.dtype)


class NumberArguments:
    """The arrays that a function is given, made for each number of rows and kept on their devices.

    Args:
        numbers: the arrays.
        microbatches: of a minibatch.
    """

    def __init__(self, numbers: list[Numbers], microbatches: int) -> None:
        self._numbers, self._microbatches = numbers, microbatches
        self._made: dict[Any, list[tf.Tensor]] = {}

    def __call__(self, rows: Mapping[int, int], scale: float) -> list[tf.Tensor]:
        """For minibatches of so many rows, by their numbers, whose loss is multiplied by the scale."""
        if not self._numbers:
            return []
        key = tuple(rows.values()), scale
        made = self._made.get(key)
        if made is None:  # several threads may make them
            if len(self._made) >= KEPT:
                self._made.clear()
            parts = {number: Parts(each, self._microbatches) for number, each in rows.items()}
            self._made[key] = made = [_array(each, parts[each.minibatch], scale) for each in self._numbers]
        return made


def _array(numbers: Numbers, parts: Parts, scale: float) -> tf.Tensor:
    with tf.device(numbers.device):
        return tf.constant(np.array(numbers.of(parts, scale), numbers.dtype.as_numpy_dtype))


FIRST, LAST = 0, -1  # the ends of a pipeline: inputs go in at the first stage, labels and sample weights at the last


class Settings(NamedTuple):
    """What a function is traced for, beside its program.

    ``parts`` are those of the minibatches that it works on, by their numbers: it serves all of the same form.
    ``scale``: by which the loss is multiplied, None if that is an argument and steps with gradients that are not finite
    are skipped. ``host``: this process's device, to which results come. ``is_timed``: whether actions are. ``updates``:
    whether updates may be in the calls of backwards. ``keeps_state``: whether the state of layers is kept in the end.

    Of a slice of a course, ``base`` is the number of the minibatch that is 0 in the program, since the pipeline was
    empty. ``results`` are the minibatches whose results it gives, ``snapshots`` those after whose updates weights are
    kept. ``drains``: whether the pipeline is empty in the end; ``has_rates``: whether learning rates are arguments.
    """

    parts: Mapping[int, Parts]
    loss_is_mean: bool
    scale: float | None
    host: str
    is_timed: bool
    updates: bool = True
    keeps_state: bool = True
    base: int = 0
    results: range = range(1)
    snapshots: frozenset[int] = frozenset()
    drains: bool = True
    has_rates: bool = False

    @property
    def microbatches(self) -> int:
        """Of a minibatch."""
        return next(iter(self.parts.values())).microbatches

    def part(self, microbatch: int) -> tuple[Parts, int]:
        """The parts of a microbatch's minibatch, and its number among these."""
        minibatch, number = divmod(microbatch, self.microbatches)
        return self.parts[minibatch], number


class Arguments:
    """The function's arguments beside minibatches: ``numbers``, arrays that depend on the numbers of their rows.

    Args:
        stages: the replicas of every stage.
        settings: of the function.
        program: whose actions say what is needed.

    ``entering`` are for each end of the pipeline the minibatches of which something goes in.
    """

    def __init__(self, stages: Sequence[Sequence[Stage]], settings: Settings, program: Program) -> None:
        self._stages, self._settings = stages, settings
        self._replicas = [len(stage) for stage in stages]
        self.numbers: list[Numbers] = []
        self._places: dict[Any, int] = {}  # of the arrays, by what they are of
        self._given: Sequence[tf.Tensor] = ()
        self._shared: dict[Any, list[Share]] = {}
        count, actions = settings.microbatches, program.all_actions()
        self.entering = {FIRST: program.entering(0, count), LAST: program.entering(len(stages) - 1, count)}
        self._is_one = count == 1 and max(self._replicas) == 1
        for end, minibatches in self.entering.items() if not self._is_one else ():
            for i in minibatches if count > 1 or self._replicas[end] > 1 else ():
                present = self._present(end, i)
                of = _rows(present, self._replicas[end])
                self._add(("rows", end, i), Numbers(i, self.entrance(end), tf.int64, len(present), of))
        for k, i in sorted({(each.stage, each.microbatch // count) for each in actions}) if not self._is_one else ():
            for r, replica in enumerate(stages[k]):
                of = _shares(r, len(stages[k]), settings.loss_is_mean)
                self._add(("shares", k, r, i), Numbers(i, replica.device, tf.float64, 5 * count, of))
        for source, sink in [(k + d, k + 1 - d) for k in range(len(stages) - 1) for d in (0, 1)]:
            for i in settings.parts if not self._is_one else ():
                for r, replica in enumerate(stages[source]):
                    if pieces := self._cut(source, sink, r, i):
                        of = _cuts(pieces, self._replicas[source], self._replicas[sink])
                        numbers = Numbers(i, replica.device, tf.int32, 3 * len(pieces), of)
                        self._add(("cuts", source, sink, r, i), numbers)
        if settings.scale is None:
            first = min(settings.parts)
            for device in dict.fromkeys(replica.device for replicas in stages for replica in replicas):
                self._add(("scale", device), Numbers(first, device, tf.float64, 1, lambda parts, scale: [scale]))

    def _add(self, place: Any, numbers: Numbers) -> None:
        self._places[place] = len(self.numbers)
        self.numbers.append(numbers)

    def give(self, numbers: Sequence[tf.Tensor]) -> None:
        """The arrays, as tensors of the function that is traced."""
        self._given, self._shared = numbers, {}

    def _present(self, end: int, minibatch: int) -> list[tuple[int, int]]:
        """Of an end of the pipeline a minibatch's microbatches and replicas that have anything."""
        replicas, parts = self._replicas[end], self._settings.parts[minibatch]
        every = [(m, r) for m in range(parts.microbatches) for r in range(replicas)]
        return [(m, r) for m, r in every if parts.has(m, r, replicas)]

    def entrance(self, end: int) -> str:
        """Where a minibatch goes in and is divided: where it is used, or here for several replicas and for GPUs."""
        device = self._stages[end][0].device
        is_here = is_remote(device) or (self._replicas[end] == 1 and is_prompt(device))
        return device if is_here else self._settings.host

    def divided(self, minibatches: Sequence[Any], end: int) -> dict[tuple[int, int], Any]:
        """The rows of the data that go in at an end, by microbatch and replica."""
        found = {}
        for i, data in zip(self.entering[end], minibatches, strict=True):
            for (m, r), part in self._parts_of(data, end, i).items():
                found[i * self._settings.microbatches + m, r] = part
        return found

    def _parts_of(self, data: Any, end: int, minibatch: int) -> dict[tuple[int, int], Any]:
        """A minibatch's parts, by its microbatches and replicas."""
        if ("rows", end, minibatch) not in self._places:
            return {(0, 0): data}
        keys, rows = self._present(end, minibatch), self._given[self._places["rows", end, minibatch]]
        flat = tf.nest.flatten(data)
        with tf.device(self.entrance(end)):
            parts = [[None] * len(keys) if each is None else tf.split(each, rows, num=len(keys)) for each in flat]
        columns: Any = zip(*parts, strict=True) if parts else [()] * len(keys)
        return {key: tf.nest.pack_sequence_as(data, list(part)) for key, part in zip(keys, columns, strict=True)}

    def scale(self, device: str) -> Any:
        """The loss scale, on a device."""
        known = self._settings.scale
        return self._given[self._places["scale", device]][0] if known is None else known

    def share(self, stage: int, replica: int, microbatch: int) -> Share:
        """What a replica's rows of a microbatch are; in the scope of its device."""
        minibatch, number = divmod(microbatch, self._settings.microbatches)
        place = stage, replica, minibatch
        if place not in self._shared:
            with tf.control_dependencies(None):  # which others use, too
                self._shared[place] = self._shares(*place)
        return self._shared[place][number]

    def _shares(self, stage: int, replica: int, minibatch: int) -> list[Share]:
        of, count = self._stages[stage][replica], self._settings.microbatches
        scale = self.scale(of.device)
        if ("shares", stage, replica, minibatch) not in self._places:
            return [Share(start=scale, scaled=scale)] * count
        given = self._given[self._places["shares", stage, replica, minibatch]]
        values = tf.unstack(tf.cast(given, tf.float32))
        shares = [Share(*values[m::count]) for m in range(count)]
        if stage == len(self._stages) - 1 and of.loss_dtype != tf.float32:  # in which its gradients begin
            starts = tf.unstack(tf.cast(given, of.loss_dtype))[3 * count : 4 * count]
            shares = [each._replace(start=start) for each, start in zip(shares, starts, strict=True)]
        return shares

    def cut(self, tensor: Any, source: int, sink: int, piece: RowsPiece, microbatch: int) -> Any:
        """A piece of the rows that a replica of one stage has for one of another; in the scope of the first's device.

        Raises ValueError for a tensor that has no rows.
        """
        if tensor is None:
            return None
        if not tensor.shape.rank or (tensor.shape[0] or 0) % piece.of:
            raise ValueError(
                "What crosses from or to a replicated stage must have the batch first. Received: a tensor of shape "
                f"{tuple(tensor.shape)}. Try a cut somewhere else, or replicas=1 there."
            )
        minibatch, m = divmod(microbatch, self._settings.microbatches)
        number = self._cut(source, sink, piece.sender, minibatch).index((m, piece.sender, piece.receiver))
        numbers = self._given[self._places["cuts", source, sink, piece.sender, minibatch]]
        start, stop, of = tf.unstack(numbers[3 * number : 3 * number + 3])
        rows = tf.shape(tensor)[0]
        told = "What crosses from or to a replicated stage must have the batch first. Try a cut somewhere else."
        with tf.control_dependencies([tf.debugging.assert_equal(rows % of, 0, told)]):
            per_row = rows // of
        return tensor[start * per_row : stop * per_row]

    def _cut(self, source: int, sink: int, replica: int, minibatch: int) -> list[tuple[int, int, int]]:
        """What a replica cuts for another stage of what it has: microbatch, and the sending and receiving replica."""
        parts = self._settings.parts[minibatch]
        return [
            (m, each.sender, each.receiver)
            for m in range(parts.microbatches)
            for each in parts.pieces(m, self._replicas[source], self._replicas[sink])
            if each.sender == replica and not each.is_whole
        ]


Of = Callable[[Parts, float], list[Any]]


def _rows(present: Sequence[tuple[int, int]], replicas: int) -> Of:
    return lambda parts, scale: [len(parts.replica(m, r, replicas)) for m, r in present]


def _shares(replica: int, replicas: int, loss_is_mean: bool) -> Of:
    """What ``Share`` has, of all microbatches one after another."""

    def of(parts: Parts, scale: float) -> list[Any]:
        fractions = [parts.fraction(m, replica, replicas) for m in range(parts.microbatches)]
        shares = [parts.share(m) * (each if replicas > 1 else 1.0) for m, each in enumerate(fractions)]
        of_loss = shares if loss_is_mean else [1.0] * len(shares)
        return [*shares, *of_loss, *fractions, *(each * scale for each in (*of_loss, *shares))]

    return of


def _cuts(wanted: Sequence[tuple[int, int, int]], senders: int, receivers: int) -> Of:
    def of(parts: Parts, scale: float) -> list[Any]:
        found: list[Any] = []
        for m, *ends in wanted:
            pieces = parts.pieces(m, senders, receivers)
            (piece,) = [each for each in pieces if [each.sender, each.receiver] == ends]
            found += [piece.start, piece.stop, piece.of]
        return found

    return of


class MinibatchResult(NamedTuple):
    """A minibatch's loss, a number or one for every row, and the model's outputs, on this process's device."""

    loss: tf.Tensor
    predictions: BoundaryTensors


class ProgramResult(NamedTuple):
    """What comes of some minibatches, and what the next function of a course goes on with.

    ``finite`` says whether all gradients were, where steps with others are skipped. ``times`` are times of day, see
    ``Clock``, which notes ``sizes``, too. ``snapshots`` are weights and state, by minibatch and stage.
    """

    minibatches: list[MinibatchResult]
    finite: tf.Tensor | None
    times: tf.Tensor | None
    sizes: tf.Tensor | None
    snapshots: list[Any]
    held: list[tf.Tensor]
