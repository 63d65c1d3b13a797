"""The shapes of a model's inputs if it leaves dimensions other than the batch open: given, or those of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.graph.input_order import in_order, structure_of
from pipetrain.schemes.arguments import is_count

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
