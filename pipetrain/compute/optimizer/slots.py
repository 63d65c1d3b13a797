"""An optimizer's slots, by the variable that each belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras

from pipetrain.compute.keras_private import LISTS, count_of, rate_of


class Slot(NamedTuple):
    """A variable that belongs to a weight, and its role: ``_momentums``, ``_velocities``, ..."""

    weight: keras.Variable
    kind: str
    variable: Any


def slots(optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]) -> Iterator[Slot]:
    """The slots of a built optimizer over as many variables as there are ``weights``, in their order.

    Keras' optimizers keep them in lists, one item (or None) for each variable.
    """
    known = {id(variable) for variable in optimizer.variables}
    for kind, items in sorted(vars(optimizer).items()):
        if isinstance(items, list) and len(items) == len(weights) and kind not in LISTS:
            for weight, item in zip(weights, items, strict=True):
                if id(item) in known:
                    yield Slot(weight, kind, item)


def shared(optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]) -> list[Any]:
    """The optimizer's variables that belong to no single weight, except its count of steps and learning rate."""
    others = {id(slot.variable) for slot in slots(optimizer, weights)}
    others |= {id(count_of(optimizer)), id(rate_of(optimizer))}
    return [variable for variable in optimizer.variables if id(variable) not in others]
