"""Nested structures of tensors as flat lists, and back: ``tf.nest`` would take longer than the call they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import tensorflow as tf


def unpacker(structure: Any) -> Callable[[Any, list[Any]], None]:
    """Make a function that appends the tensors of values with these specs to a list, as ``tf.nest`` orders them."""
    if isinstance(structure, tf.TensorSpec):
        return lambda value, flat: flat.append(value)
    if isinstance(structure, dict):
        return _all_of({key: structure[key] for key in sorted(structure)})
    if isinstance(structure, (list, tuple)):
        if all(isinstance(each, tf.TensorSpec) for each in structure):
            return lambda value, flat: flat.extend(value)
        return _all_of(dict(enumerate(structure)))

    def unpack_composite(value: Any, flat: list[Any]) -> None:
        if isinstance(value, tf.Tensor):  # what stands for it, as a call gave it
            flat.append(value)
        else:
            flat.extend(tf.nest.flatten(value, expand_composites=True))

    return unpack_composite


def _all_of(structures: dict[Any, Any]) -> Callable[[Any, list[Any]], None]:
    """The values of these keys in this order, without those that are None."""
    parts = [(key, unpacker(each)) for key, each in structures.items() if each is not None]

    def unpack_all(value: Any, flat: list[Any]) -> None:
        for key, unpack in parts:
            unpack(value[key], flat)

    return unpack_all


def packer(structure: Any) -> Callable[[Iterator[tf.Tensor]], Any]:
    """Make a function that puts flat tensors back into the structure that they were flattened from."""
    if structure is None:
        return lambda flat: None
    if isinstance(structure, dict):
        packers = {key: packer(structure[key]) for key in sorted(structure)}  # flattening goes by sorted keys
        return lambda flat: {key: pack(flat) for key, pack in packers.items()}
    if isinstance(structure, (list, tuple)):
        parts, make = [packer(each) for each in structure], getattr(structure, "_make", type(structure))
        if all(part is next for part in parts):
            return lambda flat: make(islice(flat, len(parts)))
        return lambda flat: make([pack(flat) for pack in parts])
    if isinstance(structure, tf.IndexedSlices):
        shaped = structure.dense_shape is not None
        return lambda flat: tf.IndexedSlices(next(flat), next(flat), next(flat) if shaped else None)
    return next
