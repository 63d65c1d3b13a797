"""Workers that update weights of their own, and the step that brings these together, in a function that is traced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.cores import is_remote
from pipetrain.compute.functions.flat_values import FlatReader, packing_captures
from pipetrain.compute.functions.split import specs
from pipetrain.compute.optimizer.slots import OptimizerPart, Slot
from pipetrain.compute.transfers.compression import zeros_of
from pipetrain.compute.transfers.message import Gradients, Order, in_order, mixed, sent
from pipetrain.compute.transfers.weights import Weights
from pipetrain.schemes.synchrony import Gossip, LocalSGD, joined_after

# An order of transfers, what devices have, its specs, and the mixing that follows, see ``LocalSGD``: the sums on each.
Reduce = Callable[[Order, Sequence[tuple[str, Gradients]], Gradients, float], list[Any]]


class OwnWeights:
    """What workers with weights of their own have in common.

    Args:
        weights: of every worker.
        steps: of each worker until they exchange the same weights again.
        fragments: the numbers of the weights that are exchanged at one step, see ``LocalSGD``; None: all at once.

    ``unites``: whether all workers have the same weights after a drain. ``overlaps``: whether an exchange is of the
    weights with which a step begins, and changes those with which it ends.
    """

    unites: bool
    overlaps = False

    def __init__(
        self, weights: Sequence[Weights], steps: int, fragments: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.steps, self._weights = steps, list(weights)
        self.fragments = [[*range(len(weights[0].variables))]] if fragments is None else [[*each] for each in fragments]
        with tf.device(weights[0].device):  # of each fragment the steps since the model had the weights
            self._steps_apart = [tf.Variable(0, dtype=tf.int64, trainable=False) for _ in self.fragments]

    def steps_before(self, updates: int) -> int:
        """The steps towards the next exchange that were made when the model had so many updates.

        A drain is an exchange where this ``unites``; else every ``steps``-th update is one, whatever drains there are.
        """
        return 0 if self.unites else updates

    def due(self, made: int, apart: Collection[int]) -> int | None:
        """The fragment that is exchanged in the step with which so many have been made, None where none is.

        ``apart`` are those of which workers have different weights before it.
        """
        if not self.overlaps:
            return joined_after(made, self.steps, len(self.fragments))
        found = joined_after(made - 1, self.steps, len(self.fragments))
        return found if found in apart else None  # at a drain it may have been joined already

    def apart_after(self, exchanged: int | None) -> list[int]:
        """The fragments that ``apart`` gives after a step in whose end this one was exchanged."""
        return [each for each, _ in enumerate(self.fragments) if not (self.unites and each == exchanged)]

    def _zeros(self, weights: Weights) -> list[keras.Variable]:
        with tf.device(weights.device):
            return [zeros_of(each) for each in specs(weights.variables)]

    def _as_slots(self, kind: str, variables: Sequence[keras.Variable]) -> list[Slot]:
        return [Slot(*each) for each in zip(self._originals, repeat(kind), variables, strict=False)]

    @property
    def _originals(self) -> Sequence[keras.Variable]:
        return self._weights[0].segment.trainable_variables

    def slots(self) -> list[Slot]:
        """What is kept from step to step, as slots of the weights."""
        raise NotImplementedError

    def exchange(self, fragment: int, order: Order, reduce: Reduce) -> Callable[[], None]:
        """Within a function: send a fragment, by ``reduce``, which sums for every worker; gives what then joins it."""
        raise NotImplementedError

    def settle(self, fragment: int, order: Order, reduce: Reduce) -> None:
        """Within a function: a fragment's weights that ``stored`` gives are those of all steps so far."""
        raise NotImplementedError

    def stored(self) -> list[tf.Tensor]:
        """The model's weights, after each fragment that is ``apart`` has been settled."""
        raise NotImplementedError

    @property
    def apart(self) -> list[int]:
        """The fragments of which workers have made steps that the weights which are stored do not know."""
        return [each for each, steps in enumerate(self._steps_apart) if int(steps.numpy()) > 0]

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
            for steps in self._steps_apart:
                steps.assign(0)
        for weights in self._weights[1:]:
            for part, first in zip(parts_of(weights), parts_of(self._weights[0]), strict=True):
                with tf.device(weights.device):
                    for mine, other in zip(part.shared, first.shared, strict=True):
                        mine.assign(tf.identity(tf.convert_to_tensor(other)))

    def stepped(self) -> None:
        """Within a function: every worker has updated its own weights."""
        with tf.device(self._weights[0].device):
            for steps in self._steps_apart:
                steps.assign_add(1, read_value=False)

    def _settled(self, fragment: int) -> None:
        with tf.device(self._weights[0].device):
            self._steps_apart[fragment].assign(0, read_value=False)


class OuterStep(OwnWeights):
    """Joins the workers' weights, see ``LocalSGD``: all of them do the same with the same sums.

    Args:
        options: when, and by which step.
        weights: of every worker.
        fragments: the numbers of the weights that are joined at one step.
    """

    unites = True

    def __init__(self, options: LocalSGD, weights: Sequence[Weights], fragments: Sequence[Sequence[int]]) -> None:
        super().__init__(weights, options.steps, fragments)
        self._options, self.overlaps = options, options.overlap
        self._before = [self._zeros(each) for each in weights]  # as all workers had them after the last join
        self._momenta = [self._zeros(each) for each in weights] if options.momentum else []

    def slots(self) -> list[Slot]:
        """The momentum, of which every worker has the same."""
        return self._as_slots("outer_momentum", self._momenta[0]) if self._momenta else []

    def begin(self) -> None:
        """All workers have the same weights and momentum."""
        super().begin()
        for weights, before in zip(self._weights, self._before, strict=True):
            with tf.device(weights.device):
                for copy, variable in zip(before, weights.variables, strict=True):
                    copy.assign(variable.value)
        for weights, momenta in zip(self._weights[1:], self._momenta[1:], strict=False):
            with tf.device(weights.device):
                for copy, variable in zip(momenta, self._momenta[0], strict=True):
                    copy.assign(tf.identity(variable.value))

    def stored(self) -> list[tf.Tensor]:
        """Those of the first worker, as all have them."""
        return self._weights[0].stored()

    def apart_after(self, exchanged: int | None) -> list[int]:
        """Mixed weights are apart, too."""
        return super().apart_after(None if self._mixing else exchanged)

    @property
    def _mixing(self) -> float:
        """Of a worker's own weights in what it goes on from."""
        return self._options.mixing if self.overlaps else 0.0

    def settle(self, fragment: int, order: Order, reduce: Reduce) -> None:
        """A join, as after so many steps, without mixing."""
        self._join(fragment, 0.0, self._sums(fragment, order, reduce, 0.0))

    def exchange(self, fragment: int, order: Order, reduce: Reduce) -> Callable[[], None]:
        """The outer step."""
        return partial(self._join, fragment, self._mixing, self._sums(fragment, order, reduce, self._mixing))

    def _sums(self, fragment: int, order: Order, reduce: Reduce, mixing: float) -> list[Any]:
        """Of how far all workers have moved, for each of them."""
        like = {n: each for n, each in enumerate(specs(self._weights[0].variables)) if n in self.fragments[fragment]}
        moved = [
            (weights.device, self._moved(weights, before, like))
            for weights, before in zip(self._weights, self._before, strict=True)
        ]
        return reduce(order, moved, like, mixing)

    def _join(self, fragment: int, mixing: float, of_workers: Sequence[Any]) -> None:
        if not mixing:
            self._settled(fragment)
        for number, sums in enumerate(of_workers):
            with tf.device(self._weights[number].device):
                self._apply(number, sums, mixing)

    def _moved(
        self, weights: Weights, before: Sequence[keras.Variable], numbers: Iterable[int]
    ) -> dict[int, tf.Tensor]:
        with tf.device(weights.device):
            return {n: before[n].value.read_value() - weights.variables[n].value.read_value() for n in numbers}

    def _apply(self, number: int, sums: Mapping[int, Any], mixing: float) -> None:
        options, weights, before = self._options, self._weights[number], self._before[number]
        for n in sorted(sums):
            variable, step = weights.variables[n], sums[n] / len(self._weights)
            if options.momentum:
                momentum = self._momenta[number][n].value
                made = options.momentum * momentum.read_value() + step
                momentum.assign(made, read_value=False)
                step += options.momentum * made
            joined = before[n].value.read_value() - options.rate * step
            before[n].value.assign(joined, read_value=False)
            if mixing:
                joined = mixing * variable.value.read_value() + (1 - mixing) * joined
            variable.value.assign(joined, read_value=False)


class Mixing(OwnWeights):
    """Averages each worker's weights with its neighbours', see ``Gossip``.

    Every worker keeps its weights when the model is given the average, and goes on from them where the model has that
    still; where it has others, which a user has set or a checkpoint had, all go on from those.

    Args:
        topology: who is whose neighbour.
        weights: of every worker.
        steps: of each worker until it exchanges weights.
    """

    unites = False

    def __init__(self, topology: Gossip, weights: Sequence[Weights], steps: int) -> None:
        super().__init__(weights, steps)
        self._factors = topology.mixing(len(weights))
        self._kept = [self._zeros(each) for each in weights]  # every worker's, when the model was given the average
        self._average = self._zeros(weights[0])
        self._reader: FlatReader | None = None
        self._begin: Any = None

    def slots(self) -> list[Slot]:
        """Each worker's weights."""
        return [
            slot for n, kept in enumerate(self._kept) for slot in self._as_slots(f"own_weights_of_worker_{n}", kept)
        ]

    def begin(self) -> None:
        """Workers go on from their own weights if the average of these is what the model has."""
        super().begin()
        if self._begin is None:
            self._begin = tf.function(packing_captures(self._take_kept), autograph=False).get_concrete_function()
        self._begin()

    def _take_kept(self) -> None:
        first = self._weights[0]
        if not first.variables:
            return
        averages = self._averages(self._values(self._kept))
        with tf.device(first.device):
            loaded = [each.value.read_value() for each in first.variables]
            same = [tf.reduce_all(mine == given) for mine, given in zip(averages, loaded, strict=True)]
            goes_on = tf.reduce_all(tf.stack(same))
            for variable, value in zip(self._average, loaded, strict=True):
                variable.value.assign(value, read_value=False)
        for weights, kept in zip(self._weights, self._kept, strict=True):
            there = sent(goes_on, first.device, weights.device, [])
            with tf.device(weights.device):
                for variable, mine in zip(weights.variables, kept, strict=True):
                    value = tf.where(there, mine.value.read_value(), variable.value.read_value())
                    variable.value.assign(value, read_value=False)

    def exchange(self, fragment: int, order: Order, reduce: Reduce) -> Callable[[], None]:
        """The average with the neighbours' weights."""
        like = dict(enumerate(specs(self._weights[0].variables)))
        devices = [weights.device for weights in self._weights]
        made = [(device, dict(enumerate(each))) for device, each in zip(devices, self._read(), strict=True)]
        return partial(self._take_averages, mixed(order, made, like, self._factors))

    def _take_averages(self, of_workers: Sequence[Any]) -> None:
        for weights, sums in zip(self._weights, of_workers, strict=True):
            with tf.device(weights.device):
                for n, variable in enumerate(weights.variables):
                    variable.value.assign(sums[n], read_value=False)

    def settle(self, fragment: int, order: Order, reduce: Reduce) -> None:
        """Keep every worker's weights, and make the average."""
        self._settled(fragment)
        values = self._read()
        for weights, kept, mine in zip(self._weights, self._kept, values, strict=True):
            with tf.device(weights.device):
                for variable, value in zip(kept, mine, strict=True):
                    variable.value.assign(value, read_value=False)
        averages = self._averages(values)
        with tf.device(self._weights[0].device):
            for variable, value in zip(self._average, averages, strict=True):
                variable.value.assign(value, read_value=False)

    def stored(self) -> list[tf.Tensor]:
        """The average."""
        device = self._weights[0].device
        if not is_remote(device):
            return [each.value.read_value() for each in self._average]
        if self._reader is None:
            self._reader = FlatReader(device, [each.value for each in self._average], specs(self._average))
        return self._reader()

    def _read(self) -> list[list[tf.Tensor]]:
        """Every worker's weights, within a function."""
        return self._values([weights.variables for weights in self._weights])

    def _values(self, variables: Sequence[Sequence[keras.Variable]]) -> list[list[tf.Tensor]]:
        found = []
        for weights, mine in zip(self._weights, variables, strict=True):
            with tf.device(weights.device):
                found.append([each.value.read_value() for each in mine])
        return found

    def _averages(self, values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Of all workers' weights, on the first one's device."""
        first = self._weights[0].device
        found = []
        for terms in zip(*values, strict=True):
            there = [sent(each, weights.device, first, []) for each, weights in zip(terms, self._weights, strict=True)]
            with tf.device(first):
                found.append(in_order(there) * tf.constant(1 / len(there), there[0].dtype))
        return found


def parts_of(weights: Weights) -> list[OptimizerPart]:
    """The optimizers at work on a worker's weights."""
    return [group.part() for group in weights.groups if group.variables]
