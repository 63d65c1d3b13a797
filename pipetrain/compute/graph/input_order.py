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
    ValueError where one is missing, and for what Keras refuses or would take in another order than that of the keys.
    """
    inputs = structure_of(model)
    if not isinstance(values, dict):
        if isinstance(inputs, dict) and [*inputs] != sorted(inputs):
            raise ValueError(
                f"The model takes its inputs by key. Received: x of type {type(values).__name__}. "
                f"Try a dictionary with {[*inputs]}."
            )
        return list(keras.tree.flatten(values))
    if isinstance(inputs, list | tuple) and any(keras.tree.is_nested(each) for each in inputs):
        raise ValueError(
            f"The model takes a sequence of inputs in which are others. Received: x with {list(values)}. "
            "Try the same structure as that of the model's inputs."
        )
    keyed = inputs if isinstance(inputs, dict) else {tensor.name: tensor for tensor in model.inputs}
    missing = [key for key in keyed if key not in values]
    if missing:
        raise ValueError(f"Inputs are missing: {missing}. Received: x with {list(values)}. Try x with {list(keyed)}.")
    if isinstance(inputs, dict) and sorted(values)[: len(keyed)] != sorted(keyed):
        raise ValueError(
            f"Keras takes the first keys in alphabetical order, which are others than the model's. Received: x with "
            f"{sorted(values)}. Try x with {list(keyed)}."
        )
    place = {id(tensor): key for key, each in keyed.items() for tensor in keras.tree.flatten(each)}
    if any(keras.tree.is_nested(each) for each in keyed.values()):
        return list(keras.tree.flatten({key: values[key] for key in keyed}))
    return [values[place[id(tensor)]] for tensor in model.inputs]


def packed(inputs: list[Any], model: keras.Model) -> Any:
    """Inputs in the model's order, in the structure of those that it was made of."""
    return inputs[0] if isinstance(model, keras.Sequential) else keras.tree.pack_sequence_as(model.input, inputs)
