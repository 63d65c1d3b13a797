"""What one device has of its own while it trains on its rows: the state that layers assign, in variables there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.functions.state import Division, State
from pipetrain.compute.graph.segment import Segment


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
        self._state = State(segment, True, Division(1, workers))
        self._variables: list[tf.Variable] = []

    @property
    def state(self) -> list[keras.Variable]:
        """The model's variables whose values it has."""
        return self._state.variables

    def load(self) -> bool:
        """Take the state from the model; whether that is in other variables on the device than before."""
        with tf.device(self.device):
            self._state.load(self._number)
            values = self._state.values
            like = [(each.shape, each.dtype) for each in values]
            is_new = like != [(each.shape, each.dtype) for each in self._variables]
            if is_new:
                self._variables = [tf.Variable(each, trainable=False) for each in values]
            for variable, value in zip(self._variables, values, strict=True):
                variable.assign(value)
        return is_new

    def read(self) -> list[tf.Tensor]:
        """The values, within a function."""
        with tf.device(self.device):
            return [variable.read_value() for variable in self._variables]

    def assign(self, numbers: Sequence[int], values: Sequence[tf.Tensor]) -> None:
        """New values of those with these numbers, within a function."""
        with tf.device(self.device):
            for n, value in zip(numbers, values, strict=True):
                self._variables[n].assign(value, read_value=False)

    def outcome(self, others: Sequence[Worker], averaged: Sequence[int]) -> list[Any]:
        """The values of all workers; what is ``averaged`` so, of all else the first, see ``State``."""
        for each in (self, *others):
            each._show()
        with tf.device(self.device):
            return self._state.whole([other._state for other in others], averaged)

    def _show(self) -> None:
        self._state.assign(range(len(self._variables)), self.read())

    def store(self, values: Sequence[Any]) -> None:
        """Write what ``outcome`` gave into the model."""
        self._state.store(values)
