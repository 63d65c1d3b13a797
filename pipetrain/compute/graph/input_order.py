"""A model's inputs as a flat list, whatever structure they are given in."""

from __future__ import annotations

from typing import Any

import keras


def structure_of(model: Any) -> Any:
    """The structure of symbolic tensors that a model takes its inputs in."""
    return model.inputs if isinstance(model, keras.Sequential) else model.input  # which a Sequential model may not have


def in_order(values: Any, model: Any) -> list[Any]:
    """The arguments of a model's call as a flat list, in the order of the model's inputs.

    The keys of a dictionary are those of the model's own inputs, or their names if these are not a dictionary. Raises
    ValueError where one is missing.
    """
    if not isinstance(values, dict):
        return list(keras.tree.flatten(values))
    inputs = structure_of(model)
    keyed = inputs if isinstance(inputs, dict) else {tensor.name: tensor for tensor in model.inputs}
    missing = [key for key in keyed if key not in values]
    if missing:
        raise ValueError(f"Inputs are missing: {missing}. Received: x with {list(values)}. Try x with {list(keyed)}.")
    place = {id(tensor): key for key, each in keyed.items() for tensor in keras.tree.flatten(each)}
    if len(place) != len(keyed):  # nested deeper
        return list(keras.tree.flatten({key: values[key] for key in keyed}))
    return [values[place[id(tensor)]] for tensor in model.inputs]


def packed(inputs: list[Any], model: keras.Model) -> Any:
    """Inputs in the model's order, in the structure of those that it was made of."""
    return inputs[0] if isinstance(model, keras.Sequential) else keras.tree.pack_sequence_as(model.input, inputs)
