"""The whole model's weights with their optimizers, and the state that layers assign, on one device or on several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.cores import LOCAL_HOST, finish, is_remote
from pipetrain.compute.functions.flat_values import WorkerCopies, flat, joined, packing_captures, packs_of
from pipetrain.compute.functions.graph_rewrite import inlined, made_one_by_one, packer
from pipetrain.compute.functions.kernels import Kernels
from pipetrain.compute.functions.split import specs
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_function import LossFunction, StageFunction, as_mean
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.functions.state import Division, State
from pipetrain.compute.functions.weight_groups import Shared, WeightGroup, WeightGroups
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.optimizer.clone import is_linear
from pipetrain.compute.optimizer.gradient_scaling import SCALE, squared_norm
from pipetrain.compute.optimizer.slots import OptimizerPart, Slot
from pipetrain.compute.tensorflow_private import UNORDERED, call_of
from pipetrain.compute.transfers.message import sent
from pipetrain.schemes.scheme import UpdateRule


class _Brought(NamedTuple):
    """Flat tensors in this process: what is averaged, all else of the first worker, the rows that others have."""

    averages: list[tf.Tensor]
    first: list[tf.Tensor]
    rows: list[list[tf.Tensor]]


class _Part:
    """Some of the variables that every worker has, by number."""

    def __init__(self, numbers: Sequence[int], variables: Sequence[tf.Variable]) -> None:
        self.numbers, self._specs = list(numbers), specs([variables[n] for n in numbers])
        self.packs = packs_of(self._specs)

    def flats(self, device: str, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """A worker's values, within a function."""
        with tf.device(device):
            values = [variables[n].read_value() for n in self.numbers]
            return [flat([values[n] for n in pack], device) for pack in self.packs]

    @property
    def flat_specs(self) -> list[tf.TensorSpec]:
        """Of the flat tensors."""
        sizes = [sum(self._specs[n].shape.num_elements() for n in pack) for pack in self.packs]
        return [tf.TensorSpec([size], self._specs[pack[0]].dtype) for size, pack in zip(sizes, self.packs, strict=True)]

    def values(self, flats: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        """What flat tensors have, by number."""
        return dict(zip(self.numbers, joined(self.packs, flats, self._specs), strict=True))


class WorkerStates:
    """Brings the state of all workers to this process, in one call.

    What is averaged is averaged on the first worker, and every worker is left the averages: it need not be sent them
    when training goes on.

    Args:
        devices: the workers'.
        variables: every worker's, on its device.
        averaged: the numbers of those that are averaged.
        rows: the numbers of those of which every worker has rows of its own.
    """

    def __init__(
        self,
        devices: Sequence[str],
        variables: Sequence[Sequence[tf.Variable]],
        averaged: Collection[int],
        rows: Collection[int],
    ) -> None:
        self._devices, self._variables, count = list(devices), [list(each) for each in variables], len(variables[0])
        self._averaged = _Part([n for n in range(count) if n in averaged], variables[0])
        self._first = _Part([n for n in range(count) if n not in averaged], variables[0])
        self._rows = _Part([n for n in range(count) if n in rows], variables[0])
        self._left = [self._zeros(device) for device in devices]
        self._take = [self._taking(number) for number in range(len(devices))]
        # Optimized, a division by a constant would be a product with its reciprocal.
        # And what is done would be told one by one, by TensorFlow's own order of operations.
        body = packing_captures(self._bring)
        concrete = tf.function(body, autograph=False, experimental_attributes=UNORDERED).get_concrete_function()
        for device in devices:
            finish(device)  # a function over several processes would not wait for the new variables
        self._call, self._pack = call_of(concrete, is_optimized=False), packer(concrete.structured_outputs)
        self._concrete = concrete  # TensorFlow forgets a function that nobody holds
        self.brought()  # workers are sent their parts of it now, not when an epoch ends

    def is_of(self, variables: Sequence[Sequence[tf.Variable]], averaged: Collection[int]) -> bool:
        """Whether these are the variables."""
        mine, given = ([id(each) for every in known for each in every] for known in (self._variables, variables))
        return mine == given and self._averaged.numbers == sorted(averaged)

    def _zeros(self, device: str) -> list[tf.Variable]:
        """For the averages that a worker is left."""
        with tf.device(device):
            return [
                tf.Variable(tf.zeros(each.shape, each.dtype), trainable=False) for each in self._averaged.flat_specs
            ]

    def _taking(self, number: int) -> Callable[[], Any]:
        variables, left = self._variables[number], self._left[number]

        def take() -> None:
            for n, value in self._averaged.values([each.read_value() for each in left]).items():
                variables[n].assign(value, read_value=False)

        with tf.device(self._devices[number]):
            return Kernels().op(packing_captures(take))

    def brought(self) -> list[dict[int, tf.Tensor]]:
        """Of every worker the values that are needed of it, by number."""
        made: _Brought = self._pack(iter(self._call([])))
        first = self._averaged.values(made.averages) | self._first.values(made.first)
        return [first, *(self._rows.values(each) for each in made.rows)]

    def take(self, number: int) -> None:
        """Let a worker's variables have the averages that it was left last."""
        with tf.device(self._devices[number]):
            self._take[number]()

    def _bring(self) -> _Brought:
        pairs = [*zip(self._devices, self._variables, strict=True)]
        flats = [self._averaged.flats(*each) for each in pairs]
        averages = []
        for terms in zip(*flats, strict=True):
            with tf.device(self._devices[0]):
                averages.append(tf.add_n([tf.identity(each) for each in terms]) / len(terms))
        done = []
        for device, left in zip(self._devices, self._left, strict=True):
            with tf.device(device):
                each = [
                    variable.assign(value, read_value=False) for variable, value in zip(left, averages, strict=True)
                ]
                with tf.control_dependencies(each):
                    done.append(tf.no_op())
        others = [self._rows.flats(*each) for each in pairs[1:]]
        first = self._first.flats(*pairs[0])
        with tf.device(LOCAL_HOST), tf.control_dependencies(done):
            return _Brought(*tf.nest.map_structure(tf.identity, (averages, first, others)))


def placed(captured: tf.Tensor, device: str) -> tf.Tensor:
    """What a function reads from outside, on the device that runs it: no worker fetches from this process."""
    if captured.dtype in (tf.resource, tf.variant):
        return captured
    with tf.device(device):
        return tf.identity(captured)


class Worker:
    """A device that computes the gradients of its rows of each minibatch.

    Its state lives in variables on the device, so that a function over several devices need not return it.

    Args:
        segment: the whole model.
        device: a TensorFlow device name.
        number: which of the workers it is; its random numbers are its own.
        workers: how many there are.
    """

    def __init__(self, segment: Segment, device: str, number: int, workers: int) -> None:
        self.segment, self.device, self._number = segment, device, number
        self._state, self._copies = State(segment, True, Division(1, workers)), WorkerCopies(device)
        self._variables: list[tf.Variable] = []
        self._states: WorkerStates | None = None  # of the first worker
        self._take: Callable[[], None] | None = None  # lets the variables have the averages that the worker was left

    @property
    def state(self) -> list[keras.Variable]:
        """The model's variables whose values it has."""
        return self._state.variables

    def load(self) -> bool:
        """Take the state from the model; whether that is in other variables on the device than before."""
        with tf.device(LOCAL_HOST if is_remote(self.device) else self.device):
            self._state.load(self._number)
        values = self._state.values
        like = [(each.shape, each.dtype) for each in values]
        with tf.device(self.device):
            if is_new := like != [(each.shape, each.dtype) for each in self._variables]:
                self._variables = [tf.Variable(each, trainable=False) for each in values]
            elif self._take is not None:
                self._take()
            self._take = None
            self._copies.assign(self._variables, values)
        return is_new

    def read(self, numbers: Sequence[int] | None = None) -> list[tf.Tensor]:
        """The values, all or those with these numbers."""
        with tf.device(self.device):
            every = range(len(self._variables))
            return [self._variables[n].read_value() for n in (every if numbers is None else numbers)]

    def assign(self, numbers: Sequence[int], values: Sequence[tf.Tensor]) -> None:
        """New values of those with these numbers, within a function."""
        with tf.device(self.device):
            for n, value in zip(numbers, values, strict=True):
                self._variables[n].assign(value, read_value=False)

    def outcome(self, others: Sequence[Worker], averaged: Sequence[int]) -> list[Any]:
        """The values of all workers; what is ``averaged`` so, of all else the first, see ``State``."""
        everyone = [self, *others]
        self.prepare(others, averaged)
        if self._states is None:
            for each in everyone:
                each._state.assign(range(len(each._variables)), each.read())
            with tf.device(self.device):
                return self._state.whole([other._state for other in others], averaged)
        for number, (each, values) in enumerate(zip(everyone, self._states.brought(), strict=True)):
            each._state.assign([*values], [*values.values()])
            each._take = partial(self._states.take, number)
        with tf.device(LOCAL_HOST):
            return self._state.whole([other._state for other in others])

    def prepare(self, others: Sequence[Worker], averaged: Sequence[int]) -> None:
        """Let workers in other processes have the functions that ``outcome`` calls, before an epoch ends."""
        everyone, rows = [self, *others], self._state.rows
        if not self._variables or not any(is_remote(each.device) for each in everyone):
            self._states = None
            return
        variables = [each._variables for each in everyone]
        numbers = {n for n in averaged if others and n not in rows and self._variables[n].dtype.is_floating}
        if self._states is None or not self._states.is_of(variables, numbers):
            self._states = WorkerStates([each.device for each in everyone], variables, numbers, rows)
            for number, each in enumerate(everyone):
                self._states.take(number)  # as when training goes on; then it has again what was loaded
                with tf.device(each.device):
                    each._copies.assign(each._variables, each._state.values)
                finish(each.device)

    def store(self, values: Sequence[Any]) -> None:
        """Write what ``outcome`` gave into the model."""
        self._state.store(values)


class WeightsPart(NamedTuple):
    """Some of the model's weights, by number, that are updated together, and the device on which they are."""

    device: str
    numbers: Sequence[int]


class PartedWeights(WeightGroups):
    """The model's weights, numbered as in its segment, by the parts in which they are updated."""

    def __init__(
        self,
        weights: Sequence[keras.Variable],
        parts: Sequence[WeightsPart],
        optimizer: keras.optimizers.Optimizer,
        rule: UpdateRule,
    ) -> None:
        self.originals = list(weights)
        self.own, *self.shared = (
            WeightGroup([weights[n] for n in part.numbers], part.numbers, part.device, optimizer, rule)
            for part in parts
        )
        self._number()


class Shares(NamedTuple):
    """Of a worker's rows: the factor of their loss, and of the layers' own losses, in the minibatch's."""

    loss: Any
    penalty: Any


class Made(NamedTuple):
    """What a worker makes of its rows.

    The outputs, its shares of the loss (or the loss of every row) and of the layers' own losses, the new state and
    weights that layers assign, and the gradients of all weights, None for one that the loss does not depend on.
    """

    output: BoundaryTensors
    loss: Any
    penalty: Any
    state: list[Any]
    weights: list[Any]
    gradients: list[Any]


class Weights(Stage):
    """A stage that is the whole model, whose weights are updated in parts, each with an optimizer of its own.

    Its function for the gradients of any rows is traced once, for any device.

    Args:
        segment: the whole model.
        parts: which weights are updated together, and where these are.
        optimizer: the compiled optimizer, of which each part takes a clone.
        loss: of the outputs.
        workers: that have rows of a minibatch.
        rule: what updates do in addition to the optimizer's step.
    """

    def __init__(
        self,
        segment: Segment,
        parts: Sequence[WeightsPart],
        optimizer: keras.optimizers.Optimizer,
        loss: LossFunction,
        workers: int,
        rule: UpdateRule = UpdateRule(),  # noqa: B008 - a tuple, never changed
    ) -> None:
        self._given, self.scale_factor = parts, float(optimizer.loss_scale_factor or 1.0)
        self._sums_rows, self._told = is_linear(optimizer), type(optimizer).__name__
        super().__init__(segment, parts[0].device, optimizer, loss, rule=rule, division=Division(1, workers))
        self.shared = []  # all its parts are this stage's own
        self.apart = 0  # the number of a worker whose optimizer has slots of its own

    def _grouped(
        self, shared: Sequence[Shared], optimizer: keras.optimizers.Optimizer, rule: UpdateRule
    ) -> WeightGroups:
        return PartedWeights(self.segment.trainable_variables, self._given, optimizer, rule)

    def slots(self) -> Iterator[Slot]:
        """The slots of the optimizers, and what workers keep of gradients, by the model's own variables."""
        if not self.apart:
            return super().slots()
        return (each._replace(kind=f"{each.kind}_of_worker_{self.apart}") for each in super().slots())

    def parts(self) -> list[OptimizerPart]:
        """The optimizers that have what the compiled one has gathered, by the model's own variables."""
        return [] if self.apart else super().parts()

    @property
    def groups(self) -> list[WeightGroup]:
        """The parts' weights."""
        return self._groups.all

    @property
    def gradients_like(self) -> dict[int, Any]:
        """The specs of the gradients that there are, by the weights' numbers."""
        return likes(self._gradients, self.variables)

    def _shaped(self, number: int, gradient: Any) -> Any:
        """A weight's gradient, whose shape TensorFlow may not know from the operations that make it.

        Of an embedding the rows, one for each word that the minibatch has, if the optimizer needs no more.
        """
        if isinstance(gradient, tf.IndexedSlices):
            return _summed_by_word(gradient) if self._sums_rows else gradient
        if gradient is None:
            return None
        return tf.ensure_shape(gradient, self.segment.trainable_variables[number].shape)

    @property
    def assigned(self) -> list[int]:
        """The numbers of the state's variables that layers assign to."""
        return self._function.assigned

    @property
    def assigned_weights(self) -> list[int]:
        """The numbers of the weights that layers assign to."""
        return self._function.changed

    def trace(
        self, masks: Sequence[tf.TensorSpec | None], targets: Any = None, unreached: Collection[int] = ()
    ) -> list[tf.TensorSpec | None]:
        """Trace the gradients of any rows, for any device; gives the specs of the outputs' masks."""
        self._function = StageFunction(self.segment, self._loss, self._state, self._kernels, masks, targets, ())
        halves = self._function.halves()
        unpack, residuals = self._kernels.packing.unpack, halves.residuals
        self.unreached: list[int] = []

        def make(weights: Any, state: Any, differentiable: Any, constants: Any, shares: Shares) -> Made:
            ran, given = inlined(halves.forward, weights, state, differentiable, constants)
            output, loss, penalty, (after, left) = ran
            starts = starts_of(halves.outputs, shares, self.scale_factor)
            fixed = [state[n] for n in halves.fixed]
            made, _ = inlined(halves.backward, weights, unpack(given, residuals), fixed, starts)
            made_one_by_one(made)
            gradients = [self._shaped(n, each) for n, each in enumerate(made)]
            if penalty is not None:
                penalty = tf.cast(as_mean(penalty, shares.penalty), tf.float32) * shares.penalty
            return Made(output, tf.cast(loss, tf.float32) * shares.loss, penalty, after, left, gradients)

        shares = Shares(*[tf.TensorSpec([])] * 2)
        self.made = tf.function(make, autograph=False).get_concrete_function(
            *halves.forward.structured_input_signature[0], shares
        )
        self._gradients = list(self.made.structured_outputs.gradients)
        self._groups.missing = [n for n, gradient in enumerate(self._gradients) if gradient is None]
        output, _, penalty, _ = halves.forward.structured_outputs[0]
        self.is_penalized = penalty is not None
        return [mask if mask is None else tf.TensorSpec(mask.shape, mask.dtype) for mask in output.masks]

    def load(self, iterations: int = 0, replica: int = 0) -> None:
        """Take the weights from the model, and set the optimizers' counts of minibatches; state is the workers'."""
        self._constants.clear()
        self._groups.load(iterations)

    def stored(self) -> list[tf.Tensor]:
        """The weights as ``store`` takes them."""
        return self._groups.brought()

    def store(self, values: Sequence[tf.Tensor]) -> None:
        """Write the weights, as ``stored`` gave them, into the model; state is the workers'."""
        self._groups.store(values)

    def sorted(self, values: BoundaryTensors, targets: Any) -> tuple[list[Any], Any]:
        """A minibatch's inputs as the traced function takes them."""
        return self._function.arguments(values, targets)

    def apply(self, groups: Sequence[WeightGroup], gradients: Callable[[WeightGroup], Mapping[int, Any]]) -> None:
        """Update these groups, within a function, by the gradients that each has on its device."""
        mine = [[gradients(group).get(n) for n in group.numbers] for group in groups]
        norms = []
        for group, each in zip(groups, mine, strict=True) if self.global_clipnorm else ():
            with tf.device(group.device):
                norms.append(squared_norm(self._step.prepared(each, None, self._factor())))
        for group, each in zip(groups, mine, strict=True):
            there = [sent(norm, other.device, group.device, []) for norm, other in zip(norms, groups, strict=False)]
            with tf.device(group.device):
                group.update.apply(self._step.prepared(each, tf.stack(there) if there else None, self._factor()), None)

    def _factor(self) -> Any:
        return tf.constant(self.scale_factor, SCALE.dtype) if self._step.scale is not None else None


def _summed_by_word(rows: tf.IndexedSlices) -> tf.IndexedSlices:
    """The sum of the rows of each word, of which there are no more than words; fewer bytes to send."""
    if rows.values.shape[0] is not None:  # the same for any minibatch, such as positions
        return rows
    words, place = tf.unique(rows.indices)
    sums = tf.math.unsorted_segment_sum(rows.values, place, tf.shape(words)[0])
    return tf.IndexedSlices(sums, words, rows.dense_shape)


def likes(gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> dict[int, Any]:
    """The specs of the gradients that there are, by number; a trace need not have found their shapes."""
    return {
        n: each if isinstance(each, tf.IndexedSlices) else tf.TensorSpec(variable.shape, each.dtype)
        for n, (each, variable) in enumerate(zip(gradients, variables, strict=True))
        if each is not None
    }


def starts_of(outputs: Sequence[tf.TensorSpec], shares: Shares, scale: float) -> list[tf.Tensor]:
    """The gradients with which the backward starts: of the loss, and of the layers' own losses if there are any."""
    loss, *penalties = outputs
    return [tf.cast(shares.loss * scale, loss.dtype), *penalty_starts(penalties, shares, scale)]


def penalty_starts(penalties: Sequence[tf.TensorSpec], shares: Shares, scale: float) -> list[tf.Tensor]:
    """Those of the layers' own losses."""
    starts = []
    for spec in penalties:
        share = tf.cast(shares.penalty * scale, spec.dtype)
        starts.append(share if spec.shape.rank == 0 else tf.stack([share, tf.constant(scale, spec.dtype)]))
    return starts
