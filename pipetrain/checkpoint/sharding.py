"""Which workers write their own tensors of a checkpoint: those that see its directory."""

from __future__ import annotations

import glob
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.checkpoint.bundles import Part, ShardWriter, reason
from pipetrain.checkpoint.shards import Shard, flushed, names_of, remove
from pipetrain.cluster.connection import worker_of
from pipetrain.compute.cores import is_remote

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


def processor_of(device: str) -> str:
    """The first CPU of the process that a device is in."""
    return str(tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string())


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
