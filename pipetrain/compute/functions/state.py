"""The state of a stage while its forwards run: what layers assign, and frozen weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.cores import LOCAL_HOST, is_remote
from pipetrain.compute.functions.flat_values import FlatReader, WorkerCopies
from pipetrain.compute.functions.split import specs
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.graph.sharing import is_seed
from pipetrain.schemes.splitting import microbatch_rows, rows_of

STREAMS = 1 << 12  # of random numbers that replicas may have


class Division(NamedTuple):
    """Into how many microbatches a minibatch is divided, and each of these over how many replicas."""

    microbatches: int = 1
    replicas: int = 1

    @property
    def parts(self) -> int:
        """Of a minibatch."""
        return self.microbatches * self.replicas


class HeldTensors:
    """Variables that have tensors' values for functions, on the device of the scope in which they take them.

    They can be emptied without becoming others, which functions would not know. What is read of them has the shapes
    with which they were made.

    Args:
        device: TensorFlow's name of the device; not needed for traces.
    """

    def __init__(self, device: str) -> None:
        self._device, self._copies = device, WorkerCopies(device)
        self.variables: list[tf.Variable] = []
        self._specs: list[tf.TensorSpec] = []
        self._reader: FlatReader | None = None

    @property
    def are_remote(self) -> bool:
        """Whether there are variables, in another process."""
        return bool(self.variables) and is_remote(self._device)

    def take(self, values: Sequence[tf.Tensor], shapes: Sequence[Any]) -> bool:
        """Have these values, of these shapes or parts of them; whether these are new variables."""
        like = [tf.TensorSpec(shape, value.dtype) for shape, value in zip(shapes, values, strict=True)]
        if are_new := like != self._specs:
            anything = tf.TensorShape(None)
            self.variables = [tf.Variable(value, trainable=False, shape=anything) for value in values]
            self._specs, self._reader = like, None
        elif self.are_remote:
            self._copies.assign(self.variables, values)
        else:
            for variable, value in zip(self.variables, values, strict=True):
                variable.assign(value, read_value=False)
        return are_new

    def read(self) -> list[tf.Tensor]:
        """The values."""
        found = [variable.read_value() for variable in self.variables]
        if tf.inside_function():
            for tensor, spec in zip(found, self._specs, strict=True):
                tensor.set_shape(spec.shape)
        return found

    def brought(self) -> list[tf.Tensor]:
        """The values, of a device in another process as tensors in this one."""
        return self._reader() if self._reader else self.read()

    def prepare(self, values: Sequence[tf.Tensor]) -> None:
        """Let another process have the functions by which it is asked for these values, before an epoch ends."""
        if self.are_remote and self._reader is None:
            self._reader = FlatReader(self._device, self.variables, self._specs)
            self._copies.assign(self.variables, values)

    def empty(self) -> None:
        """Have no values until others are taken."""
        for variable in self.variables:
            with tf.device(variable.device):
                variable.assign(tf.zeros([0], variable.dtype), read_value=False)


class _Values(NamedTuple):
    """Of a replica, the value of every variable, or its parts; and by number the parts of those that have any."""

    values: list[Any]
    memories: dict[int, list[tf.Tensor]]


class State:
    """The values of a stage's state at one replica, from a ``load`` to the next.

    Each forward reads ``values`` and leaves the next ones. The states of recurrent layers have a row for each of the
    minibatch: where that is divided, ``values`` has of these the rows of the microbatch and replica whose turn it is.

    Args:
        segment: the blocks.
        training: whether they train or only run forwards.
        division: of a minibatch.
        device: TensorFlow's name of where values are loaded to; not needed for traces.
    """

    def __init__(
        self,
        segment: Segment,
        training: bool,
        division: Division = Division(),  # noqa: B008 - a tuple, never changed
        device: str = "",
    ) -> None:
        self._segment, self._training, self._division = segment, training, division
        self._copies = WorkerCopies(device)
        self.variables = segment.state(training)
        self.values: list[tf.Tensor] = []
        self._memories: dict[int, list[tf.Tensor]] = {}  # by number of the variable, the part of each microbatch
        self._turns: list[int] = []  # the microbatches of which this replica has rows
        self._turn = 0
        self._held = HeldTensors(device)
        self._first: list[tf.Tensor] = []  # what was read of these last
        self._staying: set[int] = set()  # what is read of the model's variables instead

    @property
    def is_divided(self) -> bool:
        """Whether a minibatch comes in several parts."""
        return self._division.parts > 1

    @property
    def turn(self) -> int:
        """Which of the microbatches that this replica has rows of is next."""
        return self._turn

    @turn.setter
    def turn(self, turn: int) -> None:
        self._turn = turn
        self._show()

    def complete(self) -> bool:
        """Add what a trace has found to be assigned too; whether there was anything, so that a trace is to have it."""
        known, self.variables = len(self.variables), self._segment.state(self._training)
        return len(self.variables) > known

    def specs(self) -> list[tf.TensorSpec]:
        """Of the values."""
        found, rows = specs(self.variables), self._with_rows()
        return [
            tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if n in rows else spec for n, spec in enumerate(found)
        ]

    @property
    def rows(self) -> list[int]:
        """The numbers of those values that are divided with the minibatch, since they were loaded."""
        return [*self._memories]

    def _with_rows(self) -> list[int]:
        """The numbers of what is divided with the minibatch."""
        memories = {id(each) for each in self._segment.memories} if self.is_divided else set()
        return [n for n, variable in enumerate(self.variables) if id(variable) in memories]

    def load(self, replica: int) -> None:
        """Take it from the model. A generator of random numbers gives others to each replica and stage."""
        segment, training = self._segment, self._training
        self.variables = segment.state(training)  # the process may have another generator by now
        given = (state_of(each, replica, segment.users_before(each, training)) for each in self.variables)
        with tf.device(LOCAL_HOST) if self._held.are_remote else nullcontext():  # ``hold`` sends what differs
            self.values = list(given) if self._held.are_remote else self._copies.tensors(self.values, given)
            self._memories = {n: self._mine(self.values[n], replica) for n in self._with_rows()}
        parts = next(iter(self._memories.values()), [])
        self._turns, self._turn = [turn for turn, part in enumerate(parts) if part.shape[0]], 0
        self._show()

    def _mine(self, value: tf.Tensor, replica: int) -> list[tf.Tensor]:
        """Of each microbatch the replica's rows."""
        mine = []
        for rows in microbatch_rows(int(value.shape[0]), self._division.microbatches):
            within = rows_of(len(rows), replica, self._division.replicas)
            mine.append(value[rows.start + within.start : rows.start + within.stop])
        return mine

    def _show(self) -> None:
        for n, parts in self._memories.items():
            self.values[n] = parts[self._turns[self._turn]] if self._turns else parts[0]

    def assign(self, numbers: Sequence[int], values: Sequence[tf.Tensor]) -> None:
        """The new values of what a forward assigns, by number; frozen weights are state too, and stay."""
        if not values:
            return
        self.values = list(self.values)  # a forward that is to be run again may have the old ones
        for n, value in zip(numbers, values, strict=True):
            self.values[n] = value
        if self._memories:
            for n, parts in self._memories.items():
                parts[self._turns[self._turn]] = self.values[n]
            self._turn = (self._turn + 1) % len(self._turns)
            self._show()

    def whole(self, others: Sequence[State] = (), averaged: Sequence[int] = ()) -> list[Any]:
        """The values of all replicas: recurrent states joined by rows, what is ``averaged`` so, of all else the first.

        Neither counts nor seeds are averaged. None where a row is missing, because ``others`` have it.
        """
        return self._joined([_Values(each.values, each._memories) for each in (self, *others)], averaged)

    def whole_of(self, kept: Sequence[Sequence[tf.Tensor]], averaged: Sequence[int] = ()) -> list[Any]:
        """The same of what all replicas have ``kept``."""
        return self._joined([self._parted(each) for each in kept], averaged)

    def _joined(self, everyone: Sequence[_Values], averaged: Sequence[int]) -> list[Any]:
        made: list[tf.Tensor | None] = list(everyone[0].values)
        for n, first in enumerate(everyone[0].values):
            if n in self._memories and len(everyone) < self._division.replicas:
                made[n] = None
            elif n in self._memories:
                turns = zip(*(each.memories[n] for each in everyone), strict=True)
                made[n] = tf.concat([part for turn in turns for part in turn], 0)
            elif len(everyone) > 1 and n in averaged and first.dtype.is_floating:
                made[n] = tf.add_n([each.values[n] for each in everyone]) / len(everyone)
        return made

    def pairs(self, values: Sequence[Any], numbers: Sequence[int] | None = None) -> Iterator[tuple[Any, Any]]:
        """The model's variables with what ``whole`` gave; a generator of several stages, at the first of them."""
        variables = self.variables if numbers is None else [self.variables[n] for n in numbers]
        for variable, value in zip(variables, values, strict=True):
            if value is not None and not (is_seed(variable) and self._segment.users_before(variable, self._training)):
                yield variable, value

    def store(self, values: Sequence[Any], numbers: Sequence[int] | None = None) -> None:
        """Write what ``whole`` gave into the model."""
        for variable, value in self.pairs(values, numbers):
            variable.assign(value)

    def release(self) -> None:
        """Hold no tensors any more."""
        self.values, self._memories = [], {}

    def hold(self, staying: Sequence[int] = ()) -> bool:
        """Let variables have the values, on the device of this scope, for functions; whether these are new ones.

        Of what is ``staying``, by numbers, functions read the model's own; but seeds are not those of the model.
        """
        self._staying = {n for n in staying if n not in self._memories and not is_seed(self.variables[n])}
        flat = self._flat()
        shapes = [[None, *each.shape[1:]] if is_part else each.shape for is_part, each in flat]
        are_new = self._held.take([each for _, each in flat], shapes)
        self._held.prepare([each for _, each in flat])
        return are_new

    def read(self) -> None:
        """The values are those of the variables; in a function that is traced, those of its beginning."""
        self._first = self._held.read() if tf.inside_function() else self._held.brought()
        (self.values, self._memories), self._turn = self._parted(self._first), 0
        self._show()

    def _parted(self, flat: Sequence[tf.Tensor]) -> _Values:
        """The values of all variables, of those that variables hold."""
        given = iter(flat)

        def value(n: int) -> Any:
            if n in self._staying:
                return read_where_it_is(self.variables[n])
            return [next(given) for _ in self._memories[n]] if n in self._memories else next(given)

        values = [value(n) for n in range(len(self.variables))]
        return _Values(values, {n: values[n] for n in self._memories})

    def kept(self) -> list[tf.Tensor]:
        """What the variables hold, between two calls of functions."""
        return self._held.read()

    def keep(self, kept: Sequence[tf.Tensor]) -> None:
        """Let the variables hold again what was ``kept``."""
        for variable, value in zip(self._held.variables, kept, strict=True):
            variable.assign(value, read_value=False)

    def written(self) -> list[tf.Operation]:
        """Let the variables have the values of the end of the function that is traced; gives what does that."""
        return [
            variable.assign(each, read_value=False)
            for variable, before, (_, each) in zip(self._held.variables, self._first, self._flat(), strict=True)
            if each is not before
        ]

    def empty(self) -> None:
        """The variables need not have values until they are to ``hold`` others."""
        self._held.empty()
        self._first = []

    def _flat(self) -> list[tuple[bool, tf.Tensor]]:
        """Every value that is held, and whether it is one microbatch's part."""
        found: list[tuple[bool, tf.Tensor]] = []
        for n, value in enumerate(self.values):
            if n in self._staying:
                continue
            parts = self._memories.get(n)
            found += [(False, value)] if parts is None else [(True, part) for part in parts]
        return found


def read_where_it_is(variable: keras.Variable) -> tf.Tensor:
    """The value of one of the model's variables, read on its own device."""
    with tf.device(variable.value.device):
        return variable.value.read_value()


def state_of(variable: keras.Variable, replica: int, before: int = 0) -> tf.Tensor:
    """The value of a variable that is not a weight.

    A seed has a different value in every replica, and in a stage ``before`` which as many calls draw from it.
    """
    value, stream = tf.identity(variable.value), replica + STREAMS * before
    if stream and is_seed(variable):
        return value + tf.constant([stream * 2654435769 % 2**32, 0], value.dtype)
    return value
