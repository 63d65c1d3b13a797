"""Shards as TensorFlow's tensor bundles: written and read by operations, on whichever worker has the files."""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipetrain.checkpoint.shards import DATA, INDEX, Damaged, Shard, WrittenShard, check, read_through

SERIALIZED = (tf.variant, tf.string)  # which are kept as the bytes that TensorFlow makes of them
NO_REASON = "Graph execution error", "Detected at node", "<stack traces"  # how lines begin that say where it was
FINITE = ("weight/", "slot/")  # how the names begin of tensors whose values are to be finite


class Part(NamedTuple):
    """What is to be a shard: tensors by name, and where it goes, without a file's ending.

    ``device`` is the CPU of the worker that writes it.
    """

    device: str
    prefix: str
    values: Mapping[str, tf.Tensor]


class ShardWriter:
    """Lets workers write shards, all at a time; its functions are kept for tensors of the same types and shapes."""

    def __init__(self) -> None:
        self._functions: dict[Any, Any] = {}

    def write(self, parts: Sequence[Part]) -> list[WrittenShard]:
        """Write them; returns when all are there. Raises tf.errors.OpError for what a worker cannot write."""
        devices, names = tuple(each.device for each in parts), tuple(tuple(each.values) for each in parts)
        given = [_there(each) for each in parts], [[*each.values.values()] for each in parts]
        key = devices, names, *((each.dtype, tuple(each.shape)) for part in parts for each in part.values.values())
        if key not in self._functions:  # TensorFlow would warn of a function that is traced for several of them
            write = tf.function(partial(_written, devices, names), autograph=False)
            self._functions[key] = write.get_concrete_function(*given)
        made = self._functions[key](*given)
        written = []
        for part, (index, finite) in zip(parts, made, strict=True):
            kinds = {name: _kind(each).name for name, each in part.values.items()}
            unlike = {name for name, is_finite in zip(part.values, finite.numpy(), strict=True) if not is_finite}
            written.append(WrittenShard(index.numpy(), kinds, unlike))
        return written


def _there(part: Part) -> tf.Tensor:
    """Where a shard goes, on its writer: of a function over several processes, workers cannot fetch anything here."""
    with tf.device(part.device):
        return tf.constant(part.prefix)


def _written(devices: Any, names: Any, prefixes: Any, values: Any) -> Any:
    """The body of a function over all workers: gives of each shard its index, and which tensors are finite."""
    results = []
    for device, mine, prefix, tensors in zip(devices, names, prefixes, values, strict=True):
        with tf.device(device):
            kept = [_as_array(each) for each in tensors]
            saved = tf.raw_ops.SaveV2(
                prefix=prefix, tensor_names=list(mine), shape_and_slices=[""] * len(mine), tensors=kept
            )
            finite = [
                tf.reduce_all(tf.math.is_finite(each))
                if name.startswith(FINITE) and each.dtype.is_floating
                else tf.constant(True)
                for name, each in zip(mine, kept, strict=True)
            ]
            with tf.control_dependencies([saved]):
                index = tf.io.read_file(prefix + INDEX)
            results.append((index, tf.stack(finite)))
    return results


def _kind(value: tf.Tensor) -> tf.DType:
    """The type in which a tensor is written."""
    if value.dtype in SERIALIZED:
        return tf.uint8
    return tf.float32 if value.dtype == tf.bfloat16 else value.dtype


def _as_array(value: tf.Tensor) -> tf.Tensor:
    """What a controller would write of it, see ``array_of``: who reads it need not know who has written it."""
    if value.dtype in SERIALIZED:
        return tf.io.decode_raw(tf.io.serialize_tensor(value), tf.uint8)
    return tf.cast(value, _kind(value))


def read(prefix: Path, shard: Shard) -> dict[str, np.ndarray]:
    """The arrays of a shard that is there.

    Raises Damaged for one that is not what was written, OSError or MemoryError for one that cannot be read now.
    """
    check(prefix, shard)
    try:
        with _without_patterns(prefix) as name, tf.device("CPU:0"):
            return restored(name, shard)
    except tf.errors.ResourceExhaustedError as error:
        raise MemoryError(reason(error)) from error
    except tf.errors.OpError as error:
        read_through(prefix.with_name(prefix.name + DATA))
        raise Damaged(f"{shard.name + DATA}: {reason(error)}") from error


def restored(prefix: str, shard: Shard) -> dict[str, np.ndarray]:
    """The arrays of a shard, of which the device of this scope has the files. Raises tf.errors.OpError."""
    names, kinds = [*shard.tensors], [tf.as_dtype(each) for each in shard.tensors.values()]
    plain = [""] * len(names)
    found = tf.raw_ops.RestoreV2(prefix=prefix, tensor_names=names, shape_and_slices=plain, dtypes=kinds)
    return {name: each.numpy() for name, each in zip(names, found, strict=True)}


@contextmanager
def _without_patterns(prefix: Path) -> Iterator[str]:
    """A name of the same files that TensorFlow, which takes names for patterns, does not take for another one."""
    if not glob.has_magic(str(prefix)):
        yield str(prefix)
        return
    with tempfile.TemporaryDirectory() as folder:
        for ending in (INDEX, DATA):
            os.symlink(prefix.with_name(prefix.name + ending), Path(folder) / f"shard{ending}")
        yield str(Path(folder) / "shard")


def reason(error: tf.errors.OpError) -> str:
    """What TensorFlow says, without where in its own functions it happened."""
    lines = [each for each in str(error.message).rpartition("}} ")[2].split("\n") if not each.startswith(NO_REASON)]
    return next(filter(None, lines), type(error).__name__).partition(" [Op:")[0]
