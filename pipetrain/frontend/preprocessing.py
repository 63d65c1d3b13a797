"""What models preprocess that are given strings or pictures, such as keras_hub's task models.

A model that has a ``preprocessor`` and ``preprocess_samples(x, y, sample_weight)`` is given minibatches as they come,
and makes of them what its layers read, in the data pipeline. As there, arrays are then read in their order, not
shuffled. What other models are given stays as it is.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from pipetrain.frontend.input_data import DEFAULT_ROWS


def fit_arguments(model: keras.Model, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of Keras' ``fit`` for what the model's layers read, from those that the model itself would take.

    Raises ValueError for a ``validation_split`` of a data set, and as ``minibatches``.
    """
    if not preprocesses(model):
        return given
    made, rows, split = dict(given, shuffle=False), given["batch_size"], given["validation_split"]
    names, validation = ("x", "y", "sample_weight", "batch_size"), given["validation_data"]
    of_validation = made.pop("validation_batch_size", None) or rows
    if split and validation is None:
        if isinstance(given["x"], tf.data.Dataset):
            raise ValueError(
                f"A data set cannot be split. Received: validation_split={split!r}. Try validation_data=dataset."
            )
        every = _rows(given["x"], given["y"], given["sample_weight"])
        count = math.floor(len(every) * (1.0 - split))  # the last ones are split off, as Keras has it
        made |= dict.fromkeys(names) | {"x": _batched(model, every.take(count), rows), "validation_split": 0.0}
        return made | {"validation_data": _batched(model, every.skip(count), of_validation)}
    if isinstance(validation, tf.data.Dataset):
        made["validation_data"], *_ = minibatches(model, validation, None, None, None)
    elif validation is not None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation)
        made["validation_data"], *_ = minibatches(model, x, y, sample_weight, of_validation)
    return made | dict(zip(names, minibatches(model, *(given[name] for name in names)), strict=True))


def minibatches(
    model: keras.Model, x: Any, y: Any, sample_weight: Any, batch_size: int | None
) -> tuple[Any, Any, Any, int | None]:
    """The arguments ``x``, ``y``, ``sample_weight`` and ``batch_size`` for what the layers read, as a data set.

    Raises ValueError for what a data set given as ``x`` has of its own.
    """
    if not preprocesses(model):
        return x, y, sample_weight, batch_size
    if not isinstance(x, tf.data.Dataset):
        return _batched(model, _rows(x, y, sample_weight), batch_size), None, None, None
    beside = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    if present := [name for name, value in beside.items() if value is not None]:
        raise ValueError(
            "A data set has labels, weights and minibatches of its own. Received: x=Dataset and "
            f"{' and '.join(present)}. Try leaving {'it' if len(present) == 1 else 'them'} out."
        )
    return _read(model, x), None, None, None


def _rows(x: Any, y: Any, sample_weight: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(keras.utils.pack_x_y_sample_weight(x, y, sample_weight))


def _batched(model: keras.Model, rows: tf.data.Dataset, batch_size: int | None) -> tf.data.Dataset:
    return _read(model, rows.batch(batch_size or DEFAULT_ROWS))


def _read(model: keras.Model, given: tf.data.Dataset) -> tf.data.Dataset:
    """Minibatches as the layers read them."""
    return given.map(model.preprocess_samples, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def minibatch(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """One minibatch as the layers read it: ``x``, ``y`` and ``sample_weight``."""
    if not preprocesses(model):
        return x, y, sample_weight
    read: tuple[Any, Any, Any] = keras.utils.unpack_x_y_sample_weight(model.preprocess_samples(x, y, sample_weight))
    return read


def preprocesses(model: keras.Model) -> bool:
    """Whether the model has a preprocessor, as those of KerasHub may have."""
    return getattr(model, "preprocessor", None) is not None and hasattr(model, "preprocess_samples")
