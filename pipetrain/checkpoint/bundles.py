"""Shards as TensorFlow's tensor bundles: which workers write their own, and how they are written and read."""

from __future__ import annotations

import glob
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipetrain.checkpoint.shards import (
    DATA,
    INDEX,
    Damaged,
    Shard,
    WrittenShard,
    check,
    flushed,
    names_of,
    read_through,
    remove,
)
from pipetrain.cluster.connection import worker_of
from pipetrain.compute.cores import is_remote, processor_of

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


ANSWERS_S = 2.0  # in which what a worker has written is to be seen here


class Sharded(NamedTuple):
    """A checkpoint whose shards are written: those, the values that are left to the controller, what is not finite."""

    shards: list[Shard]
    left: dict[str, Any]
    not_finite: set[str]


class Sharding:
    """Lets each worker write its tensors into a directory of checkpoints, if it is one that the worker sees.

    Args:
        directory: where the controller writes.

    ``untold`` is a sentence on workers that do not see it, which nobody has been told yet; empty if there is none.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._writer = directory, ShardWriter()
        self._sees: dict[str, bool] = {}
        self.untold = ""

    def write(self, step: int, values: Mapping[str, Any]) -> Sharded:
        """Let workers write what they hold of a step's values. Raises OSError; no shard is left then."""
        by_device = self._by_worker(values)
        names = names_of(step, len(by_device))
        parts = [
            Part(device, str(self._directory / name), mine)
            for name, (device, mine) in zip(names, by_device.items(), strict=True)
        ]
        if not parts:
            return Sharded([], dict(values), set())
        theirs = {name for each in parts for name in each.values}
        try:
            written = self._writer.write(parts)
            shards = [flushed(Path(part.prefix), each) for part, each in zip(parts, written, strict=True)]
        except BaseException as error:
            for part in parts:
                remove(Path(part.prefix))
            if isinstance(error, tf.errors.OpError):
                raise OSError(f"a worker cannot write its shard: {reason(error)}") from error
            raise
        left = {name: each for name, each in values.items() if name not in theirs}
        return Sharded(shards, left, {name for each in written for name in each.not_finite})

    def discard(self, shards: Sequence[Shard]) -> None:
        """Remove shards that no manifest will name."""
        for each in shards:
            remove(self._directory / each.name)

    def _by_worker(self, values: Mapping[str, Any]) -> dict[str, dict[str, tf.Tensor]]:
        """The tensors of workers that see the directory, by the workers' CPUs."""
        found = by_worker(values)
        if not found.keys() <= self._sees.keys():
            self._probe([*found])
        return {device: mine for device, mine in found.items() if self._sees[device]}

    def _probe(self, devices: Sequence[str]) -> None:
        """See which workers find, in the directory, what the controller writes there, and write there themselves."""
        token = uuid.uuid4().hex
        asked = self._directory / f".probe-{token}"
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            asked.write_text(token, encoding="ascii")
            for n, device in enumerate(devices):
                self._sees[device] = _answers(device, asked, asked.with_name(f"{asked.name}-{n}"), token)
        finally:
            with suppress(OSError):
                asked.unlink()
        blind = [worker_of(each) or each for each in devices if not self._sees[each]]
        if blind:
            self.untold = (
                f"The directory of checkpoints, {self._directory}, is not one that {', '.join(blind)} can write to: "
                "this program writes their tensors. Try a directory that all workers share, for shorter writing."
            )


def by_worker(values: Mapping[str, Any]) -> dict[str, dict[str, tf.Tensor]]:
    """The tensors that are on workers, by the workers' CPUs."""
    found: dict[str, dict[str, tf.Tensor]] = {}
    for name, each in values.items():
        if isinstance(each, tf.Tensor) and is_remote(each.device):
            found.setdefault(processor_of(each.device), {})[name] = each
    return dict(sorted(found.items()))


def _answers(device: str, asked: Path, answer: Path, token: str) -> bool:
    """Whether a worker reads a token in this file, and its answer is found here. Raises no error of the worker's."""
    try:
        with tf.device(device):
            # To read a file that there is not would fail, which TensorFlow writes on both sides' terminals.
            if not int(tf.size(tf.io.matching_files(glob.escape(str(asked))))):
                return False
            if tf.io.read_file(str(asked)).numpy() != token.encode():
                return False
            tf.io.write_file(str(answer), token[::-1])
        until_s = time.monotonic() + ANSWERS_S
        while time.monotonic() < until_s:  # the call need not have ended, and files may come to others a little later
            with suppress(FileNotFoundError):
                if answer.read_text(encoding="ascii") == token[::-1]:
                    return True
            time.sleep(0.02)
        return False
    except (tf.errors.OpError, OSError, UnicodeError):
        return False
    finally:
        with suppress(OSError):
            os.unlink(answer)
