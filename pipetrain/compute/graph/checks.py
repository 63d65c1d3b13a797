"""Checks of a model that is to be cut into stages, and of the values that cross a cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.graph.calls import is_graph
from pipetrain.compute.graph.segment import is_differentiable
from pipetrain.compute.keras_private import history


def check_graph(model: Any) -> None:
    """Raise TypeError unless the model is Sequential or Functional, ValueError for a Sequential one without shape."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"Not a Keras model. Received: model={model!r}. Try a keras.Sequential or Functional model.")
    if isinstance(model, keras.Sequential) and not model.built:
        raise ValueError(
            f"The Sequential {model.name!r} has no input shape yet. Try keras.Input(...) as its first layer."
        )
    if not is_graph(model):
        raise TypeError(
            f"Cannot see the layers of a subclassed model. Received: model={model.name!r} ({type(model).__name__}). "
            "Try a Functional model: keras.Model(inputs, outputs). Called on a keras.Input inside one, "
            f"{type(model).__name__} becomes one block of it, which stays whole."
        )


def check_outputs(model: keras.Model, composite: Sequence[str | None]) -> None:
    """Raise ValueError for an output that is ragged or sparse; ``composite`` has the kind of each, or None."""
    for tensor, kind in zip(model.outputs, composite, strict=True):
        if kind is not None:
            operation = history(tensor)[0].name
            raise ValueError(
                f"An output of a model that is cut must be dense. Received: model={model.name!r}, whose output from "
                f"{operation!r} is {kind}. Try {'to_tensor()' if kind == 'ragged' else 'tf.sparse.to_dense'} after it."
            )


def check_crossing_types(crossing: Sequence[Any], name: str) -> None:
    """Raise ValueError for numbers that cross the cut after block ``name`` in a type that has no gradients."""
    for tensor in crossing:
        if tf.as_dtype(tensor.dtype).is_floating and not is_differentiable(tensor.dtype):
            raise ValueError(
                f"No gradient crosses a cut in the type {tensor.dtype}. Received: a cut after {name!r}, which "
                f"{tensor.name!r} crosses. Try a cut before or after what works in that type."
            )
