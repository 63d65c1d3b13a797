"""Shards of a checkpoint: the tensors of one worker, which writes them itself, as TensorFlow's tensor bundles.

A bundle is a file of tensors and a file ``.index`` with the type, shape, place and checksum (CRC32C) of each. Who has
the checksum of the index can therefore tell whether all of it is what was written.
"""

from __future__ import annotations

import glob
import os
import re
import tempfile
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

INDEX, DATA = ".index", ".data-00000-of-00001"  # of TensorFlow's, which has one file of tensors for each writer
NAME = re.compile(r"(step-\d{8,})-[0-9a-f]{8}-\d+of\d+")  # of a shard, after that of the file that names it
READ_BYTES = 1 << 22  # at a time
SERIALIZED = (tf.variant, tf.string)  # which are kept as the bytes that TensorFlow makes of them
NO_REASON = "Graph execution error", "Detected at node", "<stack traces"  # how lines begin that say where it was
FINITE = ("weight/", "slot/")  # how the names begin of tensors whose values are to be finite


class Damaged(ValueError):
    """A shard that is not what was written."""


class Shard(NamedTuple):
    """A shard that is there, as a manifest describes it.

    Attributes:
        name: of its files, but for their endings.
        index_crc32: the checksum of its index.
        data_bytes: the size of its file of tensors.
        tensors: the type of each by name.
    """

    name: str
    index_crc32: int
    data_bytes: int
    tensors: dict[str, str]

    @property
    def files(self) -> list[str]:
        """The names of its files."""
        return [self.name + INDEX, self.name + DATA]


class Part(NamedTuple):
    """What is to be a shard: tensors by name, and where it goes, without a file's ending.

    ``device`` is the CPU of the worker that writes it.
    """

    device: str
    prefix: str
    values: Mapping[str, tf.Tensor]


class WrittenShard(NamedTuple):
    """A shard as its writer sees it: its index, the types of its tensors, and the names of those that are not finite.

    Only weights and slots are looked through.
    """

    index_file: bytes
    tensors: dict[str, str]
    not_finite: set[str]


class ShardWriter:
    """Lets workers write shards, all at a time; its functions are kept for tensors of the same types and shapes."""

    def __init__(self) -> None:
        self._write = tf.function(_written, autograph=False)

    def write(self, parts: Sequence[Part]) -> list[WrittenShard]:
        """Write them; returns when all are there. Raises tf.errors.OpError for what a worker cannot write."""
        devices, names = tuple(each.device for each in parts), tuple(tuple(each.values) for each in parts)
        made = self._write(
            devices, names, [_there(each) for each in parts], [[*each.values.values()] for each in parts]
        )
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


def check(prefix: Path, shard: Shard) -> None:
    """Raise Damaged where the files of a shard are other ones, as far as that is known without reading all tensors."""
    index, data = (prefix.with_name(name) for name in shard.files)
    try:
        found, size = index.read_bytes(), data.stat().st_size
    except FileNotFoundError as error:
        raise Damaged(f"{Path(str(error.filename)).name} is missing") from error
    if size != shard.data_bytes:
        raise Damaged(f"{data.name} has {size} bytes instead of {shard.data_bytes}")
    check_index(found, shard)


def check_index(index: bytes, shard: Shard) -> None:
    """Raise Damaged where a shard's index is not the one that was written."""
    if zlib.crc32(index) != shard.index_crc32:
        raise Damaged(f"{shard.name + INDEX} has another checksum: it is damaged, or of another checkpoint")


def read_through(path: Path) -> None:
    """Raise OSError where the system does not give the bytes of a file."""
    with path.open("rb") as file:
        while file.read(READ_BYTES):
            pass


def reason(error: tf.errors.OpError) -> str:
    """What TensorFlow says, without where in its own functions it happened."""
    lines = [each for each in str(error.message).rpartition("}} ")[2].split("\n") if not each.startswith(NO_REASON)]
    return next(filter(None, lines), type(error).__name__).partition(" [Op:")[0]


def names_of(step: int, count: int) -> list[str]:
    """Names that no other shards have, not even earlier ones of the same step."""
    token = uuid.uuid4().hex[:8]
    return [f"step-{step:08}-{token}-{n}of{count}" for n in range(count)]


def shards_of(about: Mapping[str, Any]) -> list[Shard]:
    """The shards that a manifest names. Raises Damaged for what no manifest names."""
    found = [Shard(**each) for each in about.get("shards", ())]
    for each in found:
        if NAME.fullmatch(each.name) is None:
            raise Damaged(f"it names {each.name!r}, which is no shard")
    return found


def flushed(prefix: Path, written: WrittenShard) -> Shard:
    """A shard that a worker has written in a directory of this process' too, when it is on the disk.

    Raises OSError if it cannot be flushed, or if what is there is not what the worker has written.
    """
    shard = Shard(prefix.name, zlib.crc32(written.index_file), 0, written.tensors)
    index, data = (prefix.with_name(name) for name in shard.files)
    for path in (index, data):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if index.read_bytes() != written.index_file:
        raise OSError(f"a worker's {index.name} is seen as another one here")
    return shard._replace(data_bytes=data.stat().st_size)


def remove(prefix: Path) -> None:
    """Remove the files of a shard, those too that were not finished."""
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        with suppress(OSError):
            path.unlink()
