"""The newest state of a run in the memory of its workers' hosts: of each worker on its own host and on a neighbour."""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipetrain.checkpoint import store as stores
from pipetrain.checkpoint.bundles import Part, ShardWriter, by_worker, reason, restored
from pipetrain.checkpoint.shards import INDEX, Damaged, Shard, check_index
from pipetrain.checkpoint.state import Arrays, as_arrays, not_finite
from pipetrain.checkpoint.store import Checkpoint, Store
from pipetrain.checkpoint.writer import Pace
from pipetrain.cluster import host_memory
from pipetrain.cluster.connection import about, remote_devices, task_of, worker_of
from pipetrain.compute.cores import processor_of

NOTE = "memory.json"  # beside the checkpoints: which folder in memory belongs to them
KEPT = 2  # states, of which one is whole while the other is written
PLACES = ("own", "neighbour")
SHARE = 0.02  # of training's time that states in memory may take with "auto"


class Host(NamedTuple):
    """A host with workers: their CPUs, and this user's folder in its memory."""

    devices: list[str]
    memory: str


class Replica(NamedTuple):
    """A state that is written and that no list names yet: for the list, and what of it is not finite."""

    step: int
    arrays: Arrays
    about: dict[str, Any]
    not_finite: set[str]


class Replication:
    """Writes the state of a run into the memory of hosts, and finds it there again.

    What a worker holds is written twice, by that worker on its own host and by a worker of the next host, to which
    TensorFlow sends the tensors. What the controller holds, and the list of all, is in its own host's memory. Two
    states are kept alternately, and the list of one is written when all of it is there.

    Args:
        disk: the run's checkpoints, in whose directory a file names the folder in memory.
        every: the minibatches from one state to the next at least, or "auto", so that to send and write them takes
            ``SHARE`` of the time at most, though training goes on meanwhile.

    ``has_neighbours``: whether there are two hosts; a run that has lost all but one still goes on from what that one
    has.

    Raises:
        ValueError: for workers of fewer than two hosts, where none has anything yet, and for hosts without such memory.
    """

    def __init__(self, disk: Store, every: int | str = 1) -> None:
        self._disk, self._writer = disk, ShardWriter()
        self._every = 1 if isinstance(every, str) else every
        self._pace = Pace(share=SHARE) if isinstance(every, str) else None
        self._stood_s, self._is_taken = 0.0, False
        self._hosts, own = _hosts(), host_memory.folder()
        self.has_neighbours = len(self._hosts) >= len(PLACES)
        if own is None:
            raise ValueError(
                f"What the program holds is kept in {host_memory.MEMORY}, where only its user can read. Received: "
                "replicate='memory', where there is no such folder. Try replicate=None."
            )
        if not self.has_neighbours and _noted(disk) is None:
            count = sum(len(each.devices) for each in self._hosts)
            where = f"{count} workers on one machine" if count else "one process, without workers"
            raise ValueError(
                "The state of a host is kept in the memory of another one. Received: replicate='memory', "
                f"{where}. Try replicate=None, or workers on two hosts (pipetrain.connect)."
            )
        host_memory.sweep()
        self._name = _noted(disk) or self._note()
        self._lists = Store(own / self._name, KEPT)
        self._generation = self._due_at = 0

    def newer(self, found: Checkpoint | None) -> Checkpoint | None:
        """The state in memory, if it is whole and newer than what was found on the disk; else that."""
        best, lists = None, []
        for path in self._lists.paths():
            with suppress(Exception):  # of many kinds: what is wrong may be any byte
                lists.append(stores.read(path))
        for each in reversed(_newer_ones(lists, found)):
            with suppress(Exception):  # also of a worker
                best = self._whole(each)
                break
        for path in self._lists.paths():  # of others, shards are gone or will be written over
            if best is None or path != best.path:
                with suppress(OSError):
                    path.unlink()
        if best is not None:
            self._disk.run, self._generation = best.about["run"], best.about["generation"]
        self._lists.run = self._disk.run
        return found if best is None else best

    def _whole(self, listed: Checkpoint) -> Checkpoint:
        """With what hosts have of it. Raises Damaged where that is not all."""
        arrays = dict(listed.arrays)
        for each in listed.about["replicas"]:
            arrays |= self._read(Shard(**each))
        return listed._replace(arrays=arrays)

    def _read(self, shard: Shard) -> dict[str, np.ndarray]:
        """From any host that has it, wherever its worker was started anew."""
        for host in self._hosts:
            for prefix in (self._prefix(host, shard.name, place) for place in PLACES):
                with suppress(Damaged, tf.errors.OpError), tf.device(host.devices[0]):
                    # To read a file that there is not would fail, which TensorFlow writes on both sides' terminals.
                    if int(tf.size(tf.io.matching_files(prefix + INDEX))):
                        check_index(tf.io.read_file(prefix + INDEX).numpy(), shard)
                        return restored(prefix, shard)
        raise Damaged(f"no host has {shard.name}")

    def is_due(self, updates: int) -> bool:
        """Whether, after so many updates, the devices hold what the last state has not, and it is time."""
        is_time = self._pace is None or (self._pace.is_due and not self._is_taken)
        return updates >= self._due_at and is_time

    def taken(self, step: int, known: Mapping[str, Any], stood_s: float) -> None:
        """The state of this step is taken, for which training stood so long; the next one is due a call later.

        It may have the results of more than one call that no step has seen. If all are seen, another call is made.
        """
        left = known.get("in_flight") or {"ahead": 0, "minibatches": 1}
        self._due_at = step + max(self._every, min(left["ahead"], left["minibatches"]))
        self._stood_s, self._is_taken = stood_s, True
        if self._pace is not None:
            self._pace.begun()

    def took(self, seconds: float) -> None:
        """To write what was taken took so long."""
        self._is_taken = False
        if self._pace is not None:
            self._pace.ended(self._stood_s + seconds)

    def write(self, step: int, values: Mapping[str, Any], known: Mapping[str, Any]) -> Replica:
        """Write the state of a step into hosts' memory, but for its list. Raises OSError."""
        generation, mine = (self._generation + 1) % KEPT, by_worker(values)
        parts, names = [], []
        for n, (device, tensors) in enumerate(mine.items()):
            names.append(f"{generation}-{n}of{len(mine)}")
            for place, (host, writer) in zip(PLACES, self._homes(device), strict=True):
                parts.append(Part(writer, self._prefix(host, names[-1], place), tensors))
        try:
            written = self._writer.write(parts) if parts else []
        except tf.errors.OpError as error:
            raise OSError(reason(error)) from error
        replicas = [
            Shard(name, zlib.crc32(each.index_file), 0, each.tensors)._asdict()
            for name, each in zip(names, written[:: len(PLACES)], strict=True)
        ]
        theirs = {name for each in mine.values() for name in each}
        arrays = as_arrays({name: each for name, each in values.items() if name not in theirs})
        spoiled = not_finite(arrays) | {name for each in written for name in each.not_finite}
        return Replica(step, arrays, {**known, "replicas": replicas, "generation": generation}, spoiled)

    def enlist(self, replica: Replica, on_disk: int) -> None:
        """Let this be the newest state. Raises OSError. ``on_disk`` is the step of the newest checkpoint there."""
        self._lists.write(replica.step, replica.arrays, {**replica.about, "on_disk": on_disk})
        self._generation = replica.about["generation"]

    def outdated(self, step: int) -> None:
        """The disk has a checkpoint of this step: nobody goes on from a state before it."""
        for path in self._lists.paths():
            with suppress(Exception):  # of many kinds: another thread may be writing them
                if stores.read(path).about["step"] <= step:
                    path.unlink()

    def end(self) -> None:
        """Nobody needs the state any more: hosts remove their files within a second or so."""
        for host in self._hosts:
            with suppress(tf.errors.OpError), tf.device(host.devices[0]):
                tf.io.write_file(f"{host.memory}/{self._name}/{host_memory.ENDED}", "")
        shutil.rmtree(self._lists.directory, ignore_errors=True)
        with suppress(OSError):
            (self._disk.directory / NOTE).unlink()

    def _prefix(self, host: Host, name: str, place: str) -> str:
        return f"{host.memory}/{self._name}/{name}-{place}"

    def _homes(self, device: str) -> list[tuple[Host, str]]:
        """Where a worker's state goes, and who writes it there: its own host, and the next one."""
        at = next(n for n, host in enumerate(self._hosts) if device in host.devices)
        own, other = self._hosts[at], self._hosts[(at + 1) % len(self._hosts)]
        return [(own, device), (other, other.devices[own.devices.index(device) % len(other.devices)])]

    def _note(self) -> str:
        """A new folder's name, which is noted beside the checkpoints."""
        name, path = uuid.uuid4().hex, self._disk.directory / NOTE
        part = path.with_name(f".{NOTE}.{os.getpid()}.part")
        part.write_text(json.dumps({"directory": _place(self._disk), "folder": name}), encoding="utf-8")
        part.replace(path)
        return name


def _noted(disk: Store) -> str | None:
    """The folder's name, of a run in this very directory: a copy of a directory has none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads((disk.directory / NOTE).read_text(encoding="utf-8"))
        if noted["directory"] == _place(disk) and uuid.UUID(noted["folder"]).hex == noted["folder"]:
            return str(noted["folder"])
    return None


def _place(disk: Store) -> str:
    return str(disk.directory.resolve())


def way_in_memory(disk: Store) -> dict[str, Any] | None:
    """The way to train of a run that has nothing on the disk yet, by what this host has in memory."""
    own, name = host_memory.folder(), _noted(disk)
    for path in reversed(Store(own / name, KEPT).paths() if own and name else []):
        with suppress(Exception):  # of many kinds: what is wrong may be any byte
            return dict(stores.read(path).about["way"])
    return None


def _newer_ones(lists: Sequence[Checkpoint], found: Checkpoint | None) -> list[Checkpoint]:
    """The states that are newer than what was found on the disk, if they are of the same run.

    None where the disk had a newer checkpoint when one of them was made: somebody has removed it, to go back.
    """
    here, run = (-1, None) if found is None else (found.about["updates"], found.about.get("run"))
    if any(each.about["on_disk"] > here or run not in (None, each.about["run"]) for each in lists):
        return []
    return [each for each in lists if each.about["updates"] > here]


def _hosts() -> list[Host]:
    """Those of the workers that are joined, in their order. Raises ValueError for one that has no memory."""
    found: dict[str, Host] = {}
    devices = {task: processor_of(each) for each in remote_devices() if (task := task_of(each)) is not None}
    for task, device in sorted(devices.items()):
        known = about(task)
        if "memory" not in known:
            raise ValueError(
                "The state of a worker is kept in memory by workers of pipetrain that have a private folder in "
                f"{host_memory.MEMORY}. Received: replicate='memory', {worker_of(device)} without it. Try "
                "python -m pipetrain worker of this version there, or replicate=None."
            )
        found.setdefault(known["host"], Host([], known["memory"])).devices.append(device)
    return [*found.values()]
