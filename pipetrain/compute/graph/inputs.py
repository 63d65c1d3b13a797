"""A model's inputs, in whatever structure and shapes, and variables that layers have beside its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.keras_private import flat_layers, global_seed
from pipetrain.schemes.arguments import is_count


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


Shapes = tuple[tuple[int, ...], ...]  # of a model's inputs in its order, without the batch


def shapes_of_model(model: keras.Model) -> Shapes | None:
    """The shapes that the model itself defines; None if a dimension is left open."""
    return _whole([_symbolic(symbol) for symbol in model.inputs])


def shapes_of_data(x: Any, model: keras.Model) -> Shapes | None:
    """The shapes of all minibatches; None if the data do not give them before the first one, or do not fit."""
    if isinstance(x, tf.data.Dataset):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(x.element_spec)
    try:
        given = [tf.TensorShape(getattr(each, "shape", None)) for each in in_order(x, model)]
        return _whole([_seen(shape, symbol) for shape, symbol in zip(given, model.inputs, strict=True)])
    except (TypeError, ValueError):
        return None


def checked_shapes(model: keras.Model, input_shapes: Any) -> Shapes:
    """The given shapes, in the model's order, completed by those that the model defines.

    Args:
        model: a Sequential or Functional model.
        input_shapes: a tuple of sizes without the batch for one input; for several, tuples in the structure in which
            the model takes its inputs: a list, or a dictionary by keys or names, without those that are known. None
            where all are.

    Raises:
        ValueError: an input, by name, whose dimensions are neither known nor given; shapes that are not the model's.
    """
    given = _ordered(model, input_shapes)
    if len(given) != len(model.inputs):
        raise ValueError(
            f"The model takes {len(model.inputs)} inputs. Received: input_shapes={input_shapes!r} with {len(given)}. "
            f"Try input_shapes={_example(model)}."
        )
    for shape, symbol in zip(given, model.inputs, strict=True):
        if not shape.is_compatible_with(_symbolic(symbol)):
            raise ValueError(
                f"A shape does not fit the model's input, whose first dimension is the batch. Received: "
                f"input_shapes={input_shapes!r} for {symbol.name!r} of shape {tuple(symbol.shape)}. "
                f"Try input_shapes={_example(model)}."
            )
    merged = [shape.merge_with(_symbolic(symbol)) for shape, symbol in zip(given, model.inputs, strict=True)]
    for shape, symbol in zip(merged, model.inputs, strict=True):
        if not shape.is_fully_defined():
            raise ValueError(
                f"How long a profile takes depends on dimensions that the model leaves open. Received: input "
                f"{symbol.name!r} of shape {tuple(symbol.shape)}, input_shapes={input_shapes!r}. Try what a minibatch "
                f"has, without its rows, such as input_shapes={_example(model)}."
            )
    return tuple(tuple(shape.as_list()) for shape in merged)


def _whole(shapes: Sequence[tf.TensorShape]) -> Shapes | None:
    if not all(shape.is_fully_defined() for shape in shapes):
        return None
    return tuple(tuple(shape.as_list()) for shape in shapes)


def _symbolic(symbol: Any) -> tf.TensorShape:
    return tf.TensorShape(symbol.shape[1:])


def _seen(shape: tf.TensorShape, symbol: Any) -> tf.TensorShape:
    """The shape of data, rows first, as that of an input, which may have one dimension of size 1 more or less."""
    expected = len(symbol.shape)
    if shape.rank == expected - 1 and symbol.shape[-1] == 1:
        shape = shape.concatenate([1])
    elif shape.rank == expected + 1 and shape[-1] == 1:
        shape = shape[:-1]
    return _symbolic(symbol).merge_with(shape[1:])


def _ordered(model: keras.Model, input_shapes: Any) -> list[tf.TensorShape]:
    if input_shapes is None:
        return [tf.TensorShape(None)] * len(model.inputs)
    shapes = _leaves(input_shapes)
    if not isinstance(shapes, dict):
        return list(keras.tree.flatten(shapes))
    structure = structure_of(model)
    keys = list(structure if isinstance(structure, dict) else [symbol.name for symbol in model.inputs])
    if unknown := [key for key in shapes if key not in keys]:
        raise ValueError(
            f"The model has no such inputs: {unknown}. Received: input_shapes={input_shapes!r}. "
            f"Try input_shapes={_example(model)}."
        )
    return in_order({key: shapes.get(key, tf.TensorShape(None)) for key in keys}, model)


def _leaves(value: Any) -> Any:
    """The same structure with each tuple of sizes as one shape."""
    if value is None:
        return tf.TensorShape(None)
    if isinstance(value, dict):
        return {key: _leaves(each) for key, each in value.items()}
    if not isinstance(value, Sequence | tf.TensorShape) or isinstance(value, str):
        raise ValueError(
            f"A shape is a tuple of sizes from 1 up. Received: input_shapes with {value!r}. Try input_shapes=(64,)."
        )
    if all(each is None or is_count(each) for each in value):
        return tf.TensorShape(list(value))
    return [_leaves(each) for each in value]


def _example(model: keras.Model) -> Any:
    """An example of valid shapes, with 64 for open dimensions."""
    shapes = [tuple(size or 64 for size in symbol.shape[1:]) for symbol in model.inputs]
    structure = structure_of(model)
    if isinstance(structure, dict):
        places = {id(symbol): key for key, symbol in structure.items()}
        if all(id(symbol) in places for symbol in model.inputs):
            return {places[id(symbol)]: shape for symbol, shape in zip(model.inputs, shapes, strict=True)}
    return shapes[0] if len(shapes) == 1 else shapes
