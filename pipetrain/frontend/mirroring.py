"""Variables of Keras' that a distribution strategy has on every device for a while."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.keras_private import set_value
from pipetrain.compute.tensorflow_private import is_distributed, like


class _Pair(NamedTuple):
    """A variable, what it has by itself, and what it has on every device."""

    variable: keras.Variable
    own: tf.Variable
    mirrored: Any

    def mirror(self) -> None:
        """Every device gets the variable's value. Where layers have given each device another one, which nobody has
        changed since they were stored, each keeps its own.
        """
        value = self.own.numpy()
        if self.own.trainable or not np.array_equal(self.mirrored.numpy(), value, equal_nan=value.dtype.kind == "f"):
            self.mirrored.assign(value)

    def store(self) -> None:
        """The variable by itself gets the value of the first device, or what all devices have together."""
        self.own.assign(self.mirrored.read_value())


class Mirroring:
    """Lets variables have a value on each device of a strategy, as if they had been made in its scope.

    Whoever reads or assigns them meanwhile, whichever way, reads and assigns what trains. Otherwise they are as they
    were made, with the values last stored.

    Args:
        distribution: the strategy.
    """

    def __init__(self, distribution: tf.distribute.Strategy) -> None:
        self._distribution = distribution
        self._known: dict[int, _Pair] = {}  # of all variables so far: functions that were traced read these
        self._present: Sequence[_Pair] = ()

    @property
    def is_on(self) -> bool:
        """Whether the devices have the values."""
        return bool(self._present)

    def begin(self, variables: Iterable[keras.Variable]) -> None:
        """Give the devices the values of these variables; nothing has changed if this is interrupted."""
        pairs = [pair for each in variables if (pair := self._pair(each)) is not None]
        for pair in pairs:
            pair.mirror()
        self._present = pairs
        for pair in pairs:
            set_value(pair.variable, pair.mirrored)

    def store(self) -> None:
        """The variables by themselves get the values that the devices have."""
        for pair in self._present:
            pair.store()

    def end(self) -> None:
        """The variables are by themselves again, with the values that were stored last."""
        for pair in self._present:
            set_value(pair.variable, pair.own)
        self._present = ()

    def forget(self, but: Iterable[keras.Variable]) -> None:
        """Let the devices have no variables any more but these."""
        kept = {id(each) for each in but}
        self._known = {key: pair for key, pair in self._known.items() if key in kept}

    def agree(self) -> None:
        """Every device gets the first one's value of what layers have changed on each."""
        for pair in self._present:
            if not pair.own.trainable:
                pair.mirrored.assign(pair.mirrored.read_value())

    def _pair(self, variable: keras.Variable) -> _Pair | None:
        """None for what is made in a strategy's scope."""
        own = variable.value
        if is_distributed(own):
            return None
        known = self._known.get(id(variable))
        if known is None or known.own is not own:
            with self._distribution.scope():
                known = self._known[id(variable)] = _Pair(variable, own, like(own))
        return known
