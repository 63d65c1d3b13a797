"""State of a model that is in none of Keras' lists of its variables: recurrent memories, and the process's seed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from pipetrain.compute.keras_private import flat_layers, global_seed


def memories(operations: Iterable[Any]) -> list[keras.Variable]:
    """The states of the stateful recurrent layers among these operations and inside them, each once."""
    found: dict[int, keras.Variable] = {}
    for operation in operations:
        for layer in flat_layers(operation) if isinstance(operation, keras.Layer) else ():
            if isinstance(layer, keras.layers.RNN) and layer.stateful:
                found.update((id(each), each) for each in keras.tree.flatten(layer.states) if each is not None)
    return list(found.values())


def memory_rows(model: keras.Model) -> int | None:
    """The number of rows of every minibatch of a model that has such states; None if it has none."""
    return model.inputs[0].shape[0] if memories([model]) else None


def beside(model: keras.Model) -> list[keras.Variable]:
    """What training changes besides the model's variables: recurrent states and, if any, Keras' global seed."""
    seed = global_seed(make=False)
    return [*memories([model]), *([] if seed is None else [seed])]
