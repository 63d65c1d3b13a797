"""Workers that update weights of their own, and the outer step that joins these, in a function that is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.functions.split import specs
from pipetrain.compute.optimizer.slots import OptimizerPart, Slot
from pipetrain.compute.transfers.compression import zeros_of
from pipetrain.compute.transfers.message import Gradients
from pipetrain.compute.transfers.weights import Weights
from pipetrain.schemes.synchrony import LocalSGD

Reduce = Callable[[Sequence[tuple[str, Gradients]], Gradients], list[Any]]  # what devices have, to the sums on each


class OuterStep:
    """Joins the workers' weights, see ``LocalSGD``: all of them do the same with the same sums.

    Args:
        options: when, and by which step.
        weights: of every worker.
    """

    def __init__(self, options: LocalSGD, weights: Sequence[Weights]) -> None:
        self.options, self._weights = options, list(weights)
        self._before = [self._zeros(each) for each in weights]  # as all workers had them after the last join
        self._momenta = [self._zeros(each) for each in weights] if options.momentum else []
        with tf.device(weights[0].device):
            self._apart = tf.Variable(0, dtype=tf.int64, trainable=False)  # steps since the last join

    def _zeros(self, weights: Weights) -> list[keras.Variable]:
        with tf.device(weights.device):
            return [zeros_of(each) for each in specs(weights.variables)]

    def slots(self) -> list[Slot]:
        """The momentum, of which every worker has the same, as slots of the weights."""
        if not self._momenta:
            return []
        originals = self._weights[0].segment.trainable_variables
        return [Slot(*each) for each in zip(originals, repeat("outer_momentum"), self._momenta[0], strict=False)]

    @property
    def is_apart(self) -> bool:
        """Whether workers have weights of their own, as far as they know it."""
        return int(self._apart.numpy()) > 0

    def take_slots(self) -> None:
        """Let all workers' optimizers have what the first one has gathered: they have not been at work yet."""
        for weights in self._weights[1:]:
            for group, first in zip(weights.groups, self._weights[0].groups, strict=True):
                self._take(group.device, [*group.slots()], [*first.slots()])

    def _take(self, device: str, mine: Sequence[Slot], of_first: Sequence[Slot]) -> None:
        with tf.device(device):
            for slot, other in zip(mine, of_first, strict=True):
                slot.variable.assign(tf.identity(tf.convert_to_tensor(other.variable)))

    def begin(self) -> None:
        """All workers have the weights of the model, and of what they have in common that of the first."""
        with tf.device(self._weights[0].device):
            self._apart.assign(0)
        for weights in self._weights[1:]:
            for part, first in zip(parts_of(weights), parts_of(self._weights[0]), strict=True):
                with tf.device(weights.device):
                    for mine, other in zip(part.shared, first.shared, strict=True):
                        mine.assign(tf.identity(tf.convert_to_tensor(other)))
        for weights, before in zip(self._weights, self._before, strict=True):
            with tf.device(weights.device):
                for copy, variable in zip(before, weights.variables, strict=True):
                    copy.assign(variable.value)
        for weights, momenta in zip(self._weights[1:], self._momenta[1:], strict=False):
            with tf.device(weights.device):
                for copy, variable in zip(momenta, self._momenta[0], strict=True):
                    copy.assign(tf.identity(variable.value))

    def stepped(self) -> None:
        """Within a function: every worker has updated its own weights."""
        with tf.device(self._weights[0].device):
            self._apart.assign_add(1, read_value=False)

    def join(self, reduce: Reduce) -> None:
        """Within a function: the outer step, by what ``reduce`` sums for every worker."""
        with tf.device(self._weights[0].device):
            self._apart.assign(0, read_value=False)
        like = dict(enumerate(specs(self._weights[0].variables)))
        moved = [
            (weights.device, self._moved(weights, before))
            for weights, before in zip(self._weights, self._before, strict=True)
        ]
        for number, sums in enumerate(reduce(moved, like)):
            with tf.device(self._weights[number].device):
                self._apply(number, sums)

    def _moved(self, weights: Weights, before: Sequence[keras.Variable]) -> dict[int, tf.Tensor]:
        with tf.device(weights.device):
            return {
                n: was.value.read_value() - variable.value.read_value()
                for n, (was, variable) in enumerate(zip(before, weights.variables, strict=True))
            }

    def _apply(self, number: int, sums: Mapping[int, Any]) -> None:
        options, weights, before = self.options, self._weights[number], self._before[number]
        for n, variable in enumerate(weights.variables):
            step = sums[n] / len(self._weights)
            if options.momentum:
                momentum = self._momenta[number][n].value
                made = options.momentum * momentum.read_value() + step
                momentum.assign(made, read_value=False)
                step += options.momentum * made
            joined = before[n].value.read_value() - options.rate * step
            before[n].value.assign(joined, read_value=False)
            variable.value.assign(joined, read_value=False)


def parts_of(weights: Weights) -> list[OptimizerPart]:
    """The optimizers at work on a worker's weights."""
    return [group.part() for group in weights.groups if group.variables]
