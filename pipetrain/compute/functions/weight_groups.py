"""A stage's trained weights by groups that are updated together: its own, and those that it shares with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.cores import is_remote
from pipetrain.compute.functions.flat_values import FlatReader, WorkerCopies
from pipetrain.compute.functions.kernels import Kernels
from pipetrain.compute.functions.split import specs
from pipetrain.compute.functions.stage_values import Step
from pipetrain.compute.functions.weight_binding import BoundFunction, Newest, OfGroups, Tensors, Weights
from pipetrain.compute.keras_private import count_of
from pipetrain.compute.optimizer.clone import clone
from pipetrain.compute.optimizer.slots import OptimizerPart, Slot
from pipetrain.compute.optimizer.update import Update
from pipetrain.schemes.scheme import UpdateRule


class Shared(NamedTuple):
    """Weights that ``stage`` has in common with others, all of them being the ``holders``; what their updates do."""

    stage: int
    holders: tuple[int, ...]
    weights: Sequence[keras.Variable]
    rule: UpdateRule


class WeightGroup:
    """Copies of some of the model's weights on a device, with an optimizer of their own.

    Args:
        weights: the model's own variables.
        numbers: which of the stage's weights these are.
        device: a TensorFlow device name.
        optimizer: the one that makes the steps, of which the group takes a clone.
        rule: what its updates do in addition to the optimizer's own step.
        untrained: gives the copies that no gradient reaches.
        holders: the stages that have the weights, where they are shared.
        stage: the stage.
        part: gives what the group has of a weight's value; by default all of it.
    """

    def __init__(
        self,
        weights: Sequence[keras.Variable],
        numbers: Sequence[int],
        device: str,
        optimizer: keras.optimizers.Optimizer,
        rule: UpdateRule,
        untrained: Callable[[], Sequence[keras.Variable]] = tuple,
        holders: tuple[int, ...] = (),
        stage: int = 0,
        part: Callable[[keras.Variable, tf.Tensor], tf.Tensor] = lambda weight, value: value,
    ) -> None:
        self.originals, self.numbers, self.device, self.rule = list(weights), list(numbers), device, rule
        self.holders, self._later = holders, None if stage in holders[:1] or not holders else stage
        self._part, self._copies = part, WorkerCopies(device)
        with tf.device(device):
            self.variables = [like(variable, self._part_of(variable)) for variable in weights]
            self.optimizer = clone(optimizer, weights, self.variables, rule)
            # The norm of all stages' gradients is not the clone's to know: the stage clips before it updates. Before
            # that it divides by the loss scale.
            self.optimizer.global_clipnorm = self.optimizer.loss_scale_factor = None
            self.optimizer.build(self.variables)
            self.update = Update(self.optimizer, self.variables, rule, untrained)
            read = tf.function(list, autograph=False).get_concrete_function(specs(self.variables))
            self._read = BoundFunction(read, [self], _constant, Kernels())
        self._apply = tf.function(self.update.apply, autograph=False, reduce_retracing=True)
        self._staying: dict[str, Callable[..., Any]] = {}  # by what gradients are like
        self._learning_rate: float | None = None
        self._reader: FlatReader | None = None

    @property
    def is_first(self) -> bool:
        """Whether no earlier stage has these weights: this copy is the one that the model gets."""
        return self._later is None

    def predicted(self, horizon: tf.Tensor) -> list[tf.Tensor]:
        """The weights ``horizon`` minibatches ahead."""
        return self.update.predicted(horizon)

    def slots(self) -> Iterator[Slot]:
        """The slots of the optimizer, by the model's own variables."""
        return self.update.slots(self.originals, self._later)

    def part(self) -> OptimizerPart:
        """The optimizer, by the model's own variables."""
        return OptimizerPart(self.optimizer, self.originals)

    def load(self, iterations: int) -> None:
        """Take the weights from the model, and set the optimizer's count of minibatches; on the group's device."""
        count_of(self.optimizer).assign(iterations)
        self._copies.assign(self.variables, map(self._part_of, self.originals))
        if is_remote(self.device) and self.variables:
            self._read_here()  # its function is sent now, not when an epoch ends
        if self.update.fit:
            self.update.fit.reset()

    def _part_of(self, weight: keras.Variable) -> tf.Tensor:
        # A tensor: given a tf.Variable, Keras would share it.
        return self._part(weight, tf.convert_to_tensor(weight.value))

    def weights(self, wanted: Newest | Tensors = Newest()) -> Tensors:  # noqa: B008 - a tuple, never changed
        """The current weights as tensors; holding them keeps this version, as a later update then copies.

        Tensors are given back.
        """
        if not isinstance(wanted, Newest) or not self.variables:
            return [] if isinstance(wanted, Newest) else wanted
        with tf.device(self.device):
            return list(self._read(wanted))

    def brought(self) -> list[tf.Tensor]:
        """The current weights; of a group in another process, as tensors in this one."""
        if not is_remote(self.device):
            return self.weights()
        return self._read_here()() if self.variables else []

    def _read_here(self) -> FlatReader:
        if self._reader is None:
            held = [each.value for each in self.variables]
            self._reader = FlatReader(self.device, held, specs(self.variables))
        return self._reader

    def apply(self, gradients: list[Any], step: Step) -> None:
        """One step of the optimizer by gradients that were summed elsewhere, on TensorFlow's kernels.

        All stages that have the weights make the same step with the same kernels, whichever their own are: their copies
        stay bitwise equal.
        """
        self.set_rate(step.learning_rate)
        staleness = _constant(float(step.staleness), tf.float32) if self.rule.corrects else None
        if tf.inside_function():  # a call that stays one waits for all that is before it
            like = [_spec(each, of) for each, of in zip(gradients, self.variables, strict=True)]
            if str(like) not in self._staying:
                given = like, None if staleness is None else tf.TensorSpec([])
                self._staying[str(like)] = Kernels().op(self.update.apply, *given)
            self._staying[str(like)](gradients, staleness)
        else:
            self._apply(gradients, staleness)
        self.updated()

    def set_rate(self, learning_rate: float | None) -> bool:
        """The learning rate of the next step, None leaves a schedule unchanged; whether it is another one."""
        if learning_rate is None or learning_rate == self._learning_rate:
            return False
        self.optimizer._learning_rate.assign(learning_rate)
        self._learning_rate = learning_rate
        return True

    def assign_rate(self, learning_rate: tf.Tensor) -> None:
        """In a function that is traced, the learning rate of the next step."""
        self.optimizer._learning_rate.assign(learning_rate)
        self.forget_rate()

    def forget_rate(self) -> None:
        """What the learning rate is now, only the variable knows."""
        self._learning_rate = None

    def updated(self) -> None:
        """A step was made."""
        if self.update.fit:
            self.update.fit.updated()


def _constant(value: float, dtype: tf.DType) -> tf.Tensor:
    return tf.constant(value, dtype)


def _spec(gradient: Any, variable: keras.Variable) -> Any:
    if isinstance(gradient, tf.Tensor):
        return tf.TensorSpec(variable.shape, gradient.dtype)
    return None if gradient is None else tf.type_spec_from_value(gradient)


def like(variable: keras.Variable, value: tf.Tensor) -> keras.Variable:
    """A variable of this value with the same name and path; some optimizers use the name or path."""
    with ExitStack() as scopes:
        for scope in variable.path.split("/")[:-1]:
            scopes.enter_context(keras.name_scope(scope))
        copy = keras.Variable(value, trainable=True, dtype=variable.dtype, name=variable.name)
    copy.constraint = variable.constraint
    return copy


class WeightGroups:
    """A stage's copies of the model's trained weights, numbered as in the stage's segment.

    Args:
        weights: the model's variables.
        shared: those that other stages have too.
        device: a TensorFlow device name.
        optimizer: the one that makes the steps, of which every group takes a clone.
        rule: what the updates of the stage's own weights do in addition to the optimizer's step.

    ``own`` is the group that only this stage updates, ``shared`` are the others, ``all`` the own and the others.
    ``originals`` are the model's variables by number, ``variables`` the copies, and ``missing`` the numbers of those
    that no gradient reaches in this stage, as a trace finds. ``reached_elsewhere`` are those of the model's variables,
    by identity, that a gradient reaches in another stage.
    """

    missing: Sequence[int] = ()
    reached_elsewhere: frozenset[int] = frozenset()

    def __init__(
        self,
        weights: Sequence[keras.Variable],
        shared: Sequence[Shared],
        device: str,
        optimizer: keras.optimizers.Optimizer,
        rule: UpdateRule,
    ) -> None:
        self.originals = list(weights)
        number = {id(variable): n for n, variable in enumerate(weights)}
        theirs = [[number.pop(id(variable)) for variable in each.weights] for each in shared]
        own = sorted(number.values())
        self.own = WeightGroup([weights[n] for n in own], own, device, optimizer, rule, self._untrained)
        self.shared = [
            WeightGroup(each.weights, numbers, device, optimizer, each.rule, self._untrained, each.holders, each.stage)
            for each, numbers in zip(shared, theirs, strict=True)
        ]
        self._number()

    def _number(self) -> None:
        """Find all groups, and the copies by the numbers of the weights."""
        self.all = [self.own, *self.shared]
        copies = {n: copy for group in self.all for n, copy in zip(group.numbers, group.variables, strict=True)}
        self.variables = [copies[n] for n in range(len(copies))]

    def _untrained(self) -> list[keras.Variable]:
        """Those that no gradient reaches in any stage; there are none while the groups are made, which may ask."""
        return [self.variables[n] for n in self.missing if id(self.originals[n]) not in self.reached_elsewhere]

    @property
    def reached(self) -> list[keras.Variable]:
        """The model's variables that a gradient reaches."""
        return [variable for n, variable in enumerate(self.originals) if n not in self.missing]

    def slots(self) -> Iterator[Slot]:
        """The slots of the optimizers, by the model's own variables."""
        return (slot for group in self.all for slot in group.slots())

    def parts(self) -> list[OptimizerPart]:
        """The optimizers, by the model's own variables."""
        return [group.part() for group in self.all if group.variables]

    def load(self, iterations: int) -> None:
        """Take the weights from the model, and set the optimizers' counts of minibatches; on the device."""
        for group in self.all:
            group.load(iterations)

    def values(self) -> list[tf.Tensor]:
        """The weights that no earlier stage has, which may have made fewer updates by now."""
        return [value for group in self.all if group.is_first for value in group.weights()]

    def brought(self) -> list[tf.Tensor]:
        """``values``, of groups in another process as tensors in this one."""
        return [value for group in self.all if group.is_first for value in group.brought()]

    def store(self, values: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Write what ``values`` gave into the model; gives the rest of a longer sequence."""
        weights = [original for _, original in self.firsts()]
        for variable, value in zip(weights, values, strict=False):
            variable.assign(value)
        return values[len(weights) :]

    def firsts(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """The copies that no earlier stage has, each with the model's own."""
        firsts = [group for group in self.all if group.is_first]
        return [pair for group in firsts for pair in zip(group.variables, group.originals, strict=True)]

    def everything(self) -> list[Any]:
        """Each once, all variables that updates change: the copies, and what optimizers and predictions have."""
        found = [
            each
            for group in self.all
            for each in (*group.variables, *(slot.variable for slot in group.slots()), *group.optimizer.variables)
        ]
        return list({id(each): each for each in found}.values())

    def forget_rates(self) -> None:
        """What the learning rates are now, only the variables know."""
        for group in self.all:
            group.forget_rate()

    def weights(self, wanted: Weights = Newest()) -> Any:  # noqa: B008 - a tuple, never changed
        """The described weights as tensors; holding them keeps this version, as a later update then copies."""
        if isinstance(wanted, OfGroups):
            pairs = zip(self.all, wanted.groups, strict=True)
            return OfGroups(tuple(group.weights(each) for group, each in pairs))
        return self.own.weights(wanted)
