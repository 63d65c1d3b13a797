"""The state that workers in other processes have when training ends: averaged there, and brought to this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.cores import LOCAL_HOST, finish
from pipetrain.compute.functions.flat_values import flat, joined, packing_captures, packs_of
from pipetrain.compute.functions.graph_rewrite import packer
from pipetrain.compute.functions.kernels import Kernels
from pipetrain.compute.functions.split import specs
from pipetrain.compute.tensorflow_private import UNORDERED, call_of


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
