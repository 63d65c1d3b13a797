"""What models preprocess that are given strings or pictures, such as keras_hub's task models.

A model that has a ``preprocessor`` and ``preprocess_samples(x, y, sample_weight)`` is given minibatches as they come,
and makes of them what its layers read, in the data pipeline. As there, arrays are then read in their order, not
shuffled. What other models are given stays as it is.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

DEFAULT_BATCH = 32  # rows, as Keras has it


def fit_arguments(model: keras.Model, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of Keras' ``fit`` for what the model's layers read, from those that the model itself would take.

    Raises ValueError for a ``validation_split`` of what is to be preprocessed.
    """
    if not _preprocesses(model):
        return given
    if given["validation_split"]:
        raise ValueError(
            "What is preprocessed is not split. Received: "
            f"validation_split={given['validation_split']!r}. Try validation_data=(x, y)."
        )
    made, rows = dict(given, shuffle=False), given["batch_size"]
    if (validation := given["validation_data"]) is not None:
        parts = (validation,) if isinstance(validation, tf.data.Dataset) else tuple(validation)
        x, y, sample_weight = (*parts, None, None)[:3]
        of_validation = made.pop("validation_batch_size", None) or rows
        made["validation_data"], *_ = minibatches(model, x, y, sample_weight, of_validation)
    names = "x", "y", "sample_weight", "batch_size"
    return made | dict(zip(names, minibatches(model, *(given[name] for name in names)), strict=True))


def minibatches(
    model: keras.Model, x: Any, y: Any, sample_weight: Any, batch_size: int | None
) -> tuple[Any, Any, Any, int | None]:
    """The arguments ``x``, ``y``, ``sample_weight`` and ``batch_size`` for what the layers read, as a data set."""
    if not _preprocesses(model):
        return x, y, sample_weight, batch_size
    given = x
    if not isinstance(x, tf.data.Dataset):
        packed = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        given = tf.data.Dataset.from_tensor_slices(packed).batch(batch_size or DEFAULT_BATCH)
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
