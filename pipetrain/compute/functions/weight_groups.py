"""All trained weights of a stage, by groups that are updated together: its own, and those that it shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.functions.weight_binding import Newest, OfGroups, Weights
from pipetrain.compute.functions.weight_group import Shared, WeightGroup
from pipetrain.compute.optimizer.adoption import OptimizerPart
from pipetrain.compute.optimizer.slots import Slot
from pipetrain.schemes.scheme import UpdateRule


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

    def store(self, values: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Write what ``values`` gave into the model; gives the rest of a longer sequence."""
        weights = [variable for group in self.all if group.is_first for variable in group.originals]
        for variable, value in zip(weights, values, strict=False):
            variable.assign(value)
        return values[len(weights) :]

    def weights(self, wanted: Weights = Newest()) -> Any:  # noqa: B008 - a tuple, never changed
        """The described weights as tensors; holding them keeps this version, as a later update then copies."""
        if isinstance(wanted, OfGroups):
            pairs = zip(self.all, wanted.groups, strict=True)
            return OfGroups(tuple(group.weights(each) for group, each in pairs))
        return self.own.weights(wanted)
