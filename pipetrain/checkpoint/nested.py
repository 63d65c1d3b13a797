"""Nested values with tensors, as what JSON holds and a list of tensors: what is in flight, in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from pipetrain.compute.functions import stage_values, weight_binding, weight_products
from pipetrain.compute.program import late_sums, stage_trace, walk
from pipetrain.compute.tensorflow_private import parts_of_slices_spec
from pipetrain.run import collector
from pipetrain.schemes import policies, weight_versions

IN_FLIGHT = (stage_values, weight_binding, weight_products, late_sums, stage_trace, walk, collector, policies)
RECORDS: dict[str, Any] = {  # all that these modules have, whether it is in flight today or not
    name: kind
    for module in (*IN_FLIGHT, weight_versions)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, tuple) and kind.__module__ == module.__name__
}


class Unwritable(TypeError):
    """A value that cannot be written."""


def plain(value: Any, tensors: list[tf.Tensor]) -> Any:
    """What JSON holds of a nested value; its tensors are added to the list. Raises Unwritable for what is unknown here.

    Numbers, texts, truth values and None are themselves; anything else is an object of one entry.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tf.Tensor):
        if value.dtype == tf.resource:
            raise Unwritable("a resource, such as a table or a generator of random numbers, is in flight")
        tensors.append(value)
        return {"tensor": [len(tensors) - 1, value.dtype.name, value.device]}
    if isinstance(value, tf.TypeSpec):
        return _plain_spec(value)
    if isinstance(value, dict):
        return {"dict": [[plain(key, tensors), plain(each, tensors)] for key, each in value.items()]}
    name = type(value).__name__
    if type(value) in (tuple, list):
        return {name: [plain(each, tensors) for each in value]}
    if RECORDS.get(name) is type(value):
        return {"record": [name, [plain(each, tensors) for each in value]]}
    raise Unwritable(f"a value of type {name} is in flight")


def _plain_spec(spec: tf.TypeSpec) -> Any:
    if isinstance(spec, tf.TensorSpec):
        return {"spec": [_sizes(spec.shape), spec.dtype.name]}
    if isinstance(spec, tf.IndexedSlicesSpec):
        shape, *dtypes, indices = parts_of_slices_spec(spec)
        return {"slices": [_sizes(shape), *(each and each.name for each in dtypes), _sizes(indices)]}
    raise Unwritable(f"a value of {type(spec).__name__} is in flight")


def nested(value: Any, tensor: Callable[[int, tf.DType, str], tf.Tensor]) -> Any:
    """What ``plain`` was given; ``tensor`` gives a tensor by its number in the list, its type and its device then."""
    if not isinstance(value, dict):
        return value
    ((kind, given),) = value.items()
    if kind == "tensor":
        number, dtype, device = given
        return tensor(number, tf.as_dtype(dtype), device)
    if kind == "spec":
        return tf.TensorSpec(given[0], tf.as_dtype(given[1]))
    if kind == "slices":
        shape, *dtypes, indices = given
        types = [each and tf.as_dtype(each) for each in dtypes]
        return tf.IndexedSlicesSpec(shape, *types, indices)
    if kind == "dict":
        return {nested(key, tensor): nested(each, tensor) for key, each in given}
    if kind == "record":
        name, fields = given
        return RECORDS[name](*(nested(each, tensor) for each in fields))
    return {"tuple": tuple, "list": list}[kind](nested(each, tensor) for each in given)


def _sizes(shape: Any) -> Any:
    return None if shape.rank is None else list(shape)
