"""What models preprocess that are given strings or pictures, such as keras_hub's task models.

A model that has a ``preprocessor`` and ``preprocess_samples(x, y, sample_weight)`` is given minibatches as they come,
and makes of them what its layers read, in the data pipeline. As there, arrays are then read in their order, not
shuffled. What other models are given stays as it is.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipetrain.frontend.input_data import DEFAULT_ROWS


def fit_arguments(model: keras.Model, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of Keras' ``fit`` for what the model's layers read, from those that the model itself would take.

    Raises ValueError for a ``validation_split`` of a data set, and as ``minibatches``.
    """
    if not _preprocesses(model):
        return given
    made, rows = dict(given, shuffle=False), given["batch_size"]
    read = [given[name] for name in ("x", "y", "sample_weight")]
    validation = given["validation_data"]
    if (split := given["validation_split"]) and validation is None:
        if isinstance(given["x"], tf.data.Dataset):
            raise ValueError(
                f"A data set cannot be split. Received: validation_split={split!r}. Try validation_data=dataset."
            )
        read, validation = _split(read, split)
    made["validation_split"] = 0.0
    if validation is not None:
        of_validation = made.pop("validation_batch_size", None)
        if isinstance(validation, tf.data.Dataset):
            made["validation_data"], *_ = minibatches(model, validation, None, None, None)
        else:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation)
            made["validation_data"], *_ = minibatches(model, x, y, sample_weight, of_validation or rows)
    names = "x", "y", "sample_weight", "batch_size"
    return made | dict(zip(names, minibatches(model, read[0], read[1], read[2], rows), strict=True))


def _split(read: list[Any], part: float) -> tuple[list[Any], tuple[Any, ...]]:
    """What is trained on, and what is validated on: the last rows, as Keras has it."""
    arrays = keras.tree.map_structure(lambda each: each if each is None else np.asarray(each), read)
    rows = len(next(each for each in keras.tree.flatten(arrays) if each is not None))
    count = math.floor(rows * (1.0 - part))
    first, last = (
        keras.tree.map_structure(lambda each, which=which: each if each is None else each[which], arrays)
        for which in (slice(count), slice(count, None))
    )
    return first, tuple(last)


def minibatches(
    model: keras.Model, x: Any, y: Any, sample_weight: Any, batch_size: int | None
) -> tuple[Any, Any, Any, int | None]:
    """The arguments ``x``, ``y``, ``sample_weight`` and ``batch_size`` for what the layers read, as a data set.

    Raises ValueError for what a data set given as ``x`` has of its own.
    """
    if not _preprocesses(model):
        return x, y, sample_weight, batch_size
    given = x
    if isinstance(x, tf.data.Dataset):
        beside = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
        if present := [name for name, value in beside.items() if value is not None]:
            raise ValueError(
                f"A data set has labels, weights and minibatches of its own. Received: x=Dataset and "
                f"{' and '.join(present)}. Try leaving {'it' if len(present) == 1 else 'them'} out."
            )
    else:
        packed = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        given = tf.data.Dataset.from_tensor_slices(packed).batch(batch_size or DEFAULT_ROWS)
    read = given.map(model.preprocess_samples, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    return read, None, None, None


def minibatch(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """One minibatch as the layers read it: ``x``, ``y`` and ``sample_weight``."""
    if not _preprocesses(model):
        return x, y, sample_weight
    read: tuple[Any, Any, Any] = keras.utils.unpack_x_y_sample_weight(model.preprocess_samples(x, y, sample_weight))
    return read


def _preprocesses(model: keras.Model) -> bool:
    return getattr(model, "preprocessor", None) is not None and hasattr(model, "preprocess_samples")
