"""Shards of a checkpoint: the tensors of one worker, which writes them itself, as TensorFlow's tensor bundles.

A bundle is a file of tensors and a file ``.index`` with the type, shape, place and checksum (CRC32C) of each. Who has
the checksum of the index can therefore tell whether all of it is what was written.
"""

from __future__ import annotations

import os
import re
import uuid
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

INDEX, DATA = ".index", ".data-00000-of-00001"  # of TensorFlow's, which has one file of tensors for each writer
NAME = re.compile(r"(step-\d{8,})-[0-9a-f]{8}-\d+of\d+")  # of a shard, after that of the file that names it
READ_BYTES = 1 << 22  # at a time


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


class WrittenShard(NamedTuple):
    """A shard as its writer sees it: its index, the types of its tensors, and the names of those that are not finite.

    Only weights and slots are looked through.
    """

    index_file: bytes
    tensors: dict[str, str]
    not_finite: set[str]


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
