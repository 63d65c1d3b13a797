"""Refuses data that do not fit the model, or each other."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.graph.input_order import in_order
from pipetrain.compute.graph.segment import adapted


def check_data(x: Any, y: Any) -> None:
    """Refuse missing data and arrays of different lengths."""
    if x is None:
        raise ValueError(
            "There is nothing to train on. Received: x=None. Try fit(x, y) with arrays or a tf.data.Dataset."
        )
    lengths = {rows_of_array(array) for array in keras.tree.flatten((x, y)) if is_array(array)}
    if 0 in lengths:
        raise ValueError("There is nothing to train on. Received: x or y with no rows. Try at least one row.")
    if len(lengths) > 1:
        raise ValueError(
            f"Inputs and labels differ in length. Received: x and y with {sorted(lengths)} rows. "
            "Try as many labels as inputs."
        )


def check_rows(rows: int | None, microbatches: int) -> None:
    """Refuse a batch with fewer rows than microbatches."""
    if rows is not None and rows < microbatches:
        raise ValueError(
            f"The batch is smaller than its microbatches. Received: {rows} rows, microbatches={microbatches}. "
            f"Try microbatches={rows} or a batch size of at least {microbatches}."
        )


def check_memory(rows: int, remembered: int | None) -> None:
    """Refuse a batch of another number of rows than stateful recurrent layers have states for; None without such."""
    if remembered is not None and rows != remembered:
        raise ValueError(
            f"A stateful recurrent layer remembers {remembered} rows, from batch to batch. Received: a batch of {rows} "
            f"rows. Try batch_size={remembered}, and data that fill the last batch."
        )


def checked_inputs(x: Any, model: keras.Model) -> list[tf.Tensor]:
    """The minibatch's inputs in the model's order, types and ranks. Raises ValueError where they cannot agree."""
    given = in_order(x, model)
    names = [tensor.name for tensor in model.inputs]
    if len(given) != len(names):
        raise ValueError(f"The model takes {len(names)} inputs. Received: x with {len(given)}. Try x as {names!r}.")
    return [_checked(value, expected) for value, expected in zip(given, model.inputs, strict=True)]


def _checked(value: Any, expected: Any) -> tf.Tensor:
    if value is None:
        raise ValueError(
            f"Every input must be given, an optional one too. Received: x with None for {expected.name!r}. Try zeros "
            "that stand for it, or a model without this input."
        )
    if isinstance(value, tf.RaggedTensor) or (isinstance(value, tf.SparseTensor) and expected.sparse):
        raise ValueError(
            f"Inputs must be dense. Received: x of type {type(value).__name__} for {expected.name!r}. Try to_tensor() "
            "of a ragged tensor, or keras.Input(sparse=False), which makes sparse tensors and SciPy's matrices dense."
        )
    if isinstance(value, tf.SparseTensor):  # as Keras does
        value = tf.sparse.to_dense(value)
    tensor = adapted(tf.convert_to_tensor(value), expected)
    if not tf.TensorShape([None, *expected.shape[1:]]).is_compatible_with(tensor.shape):
        raise ValueError(
            f"The data do not fit the model. Received: x of shape {tuple(tensor.shape)} for {expected.name!r}. "
            f"Try shape {tuple(expected.shape)}."
        )
    return tensor


def rows_of_array(array: Any) -> int:
    """The number of its rows; SciPy's sparse matrices have no length."""
    return int(array.shape[0]) if hasattr(array, "tocsr") else len(array)


def is_array(value: Any) -> bool:
    """Whether it has rows and is not read from an iterator."""
    return hasattr(value, "__len__") and hasattr(value, "shape") and hasattr(value, "dtype")
