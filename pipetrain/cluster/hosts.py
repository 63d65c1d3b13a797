"""The workers of a cluster: their addresses, as a hosts file, TF_CONFIG or a program says them, and their commands."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = "PIPETRAIN_WORKER_NAMES"  # the hosts of addresses, as JSON
JOBS = "PIPETRAIN_WORKER_JOBS"  # whose workers are to be at addresses, as JSON
RUN = "PIPETRAIN_RUN"  # what tells a launcher from an earlier one, if the job's name does not
LOOPBACK = "127.0.0.1"
OF_TF_CONFIG = 'Try {"cluster": {"worker": ["10.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}.'
EXAMPLE = '{"workers": ["10.0.0.1:2222", "10.0.0.2:2222"]}'
ROOT = str(Path(__file__).parents[2])  # of this very package, wherever the program has it from
# Python would put the current folder first on the path of modules, where anybody may have written; -P is of 3.11 on.
# One line: csh, which may be the shell of a host, takes no other. It begins with what a list of processes is to show.
MAIN = (
    "pipetrain = None; import sys; sys.path = [each for each in sys.path if each]; root, name = sys.argv[1:3]; "
    "del sys.argv[1:3]; "
    "sys.path[:0] = {root} - {*sys.path, str()}; from importlib import import_module; "
    "sys.exit(import_module(name).main())"
)


def split(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``, or of ``[host]:port`` for an IPv6 address; ValueError for anything else."""
    match = re.fullmatch(r"([\w.-]+|\[([0-9a-fA-F:.]+)\]):(\d{1,5})", address) if isinstance(address, str) else None
    if match is None or not 0 < int(match[3]) < 2**16 or not (match[2] is None or is_ipv6(match[2])):
        raise ValueError(
            f"{address!r} is not an address such as 10.0.0.1:2222 or [fd00::1]:2222, with a port from 1 to {2**16 - 1}"
        )
    return match[2] or match[1], int(match[3])


def named(address: str) -> str:
    """A worker's address with the name of its host before it, if the launcher that started it has told that."""
    name = json.loads(os.environ.get(NAMES) or "{}").get(address)
    return f"{name} ({address})" if name else address


def job_of(address: str) -> str | None:
    """Whose worker is to be there by the launcher that started it; None if it has told nothing."""
    found = json.loads(os.environ.get(JOBS) or "{}").get(address)
    return None if found is None else str(found)


def with_port(host: str, port: int) -> str:
    """``host:port``, with the brackets of an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ipv6(text: str) -> bool:
    """Whether this is an IPv6 address, without brackets."""
    with suppress(ValueError):
        return ipaddress.ip_address(text).version == 6
    return False


def is_loopback(address: str) -> bool:
    """Whether only this machine has such an address, given with or without a port."""
    host = address
    with suppress(ValueError):  # without a port
        host, _ = split(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


@dataclass(frozen=True)
class Hosts:
    """Addresses of the workers, ``host:port``, in the order of their tasks.

    Raises ValueError, with what is wrong, for none, for one given twice, and for what is no address.
    """

    workers: tuple[str, ...]

    def __post_init__(self) -> None:
        for n, address in enumerate(self.workers):
            try:
                split(address)
            except ValueError as error:
                raise ValueError(f"workers[{n}]: {error}") from error
        twice = [address for address in dict.fromkeys(self.workers) if self.workers.count(address) > 1]
        if twice or not self.workers:
            raise ValueError(f"workers: {twice[0]} is there twice" if twice else "workers: there are none")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Hosts:
        """Read a hosts file: JSON such as ``{"workers": ["10.0.0.1:2222", "10.0.0.2:2222"]}``.

        Raises ValueError with the file and the key that is wrong.
        """
        try:
            return cls._of(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(
                f"The hosts file cannot be read: {error.strerror}. Received: {str(path)!r}. "
                "Try the path of one; a program may give addresses."
            ) from error
        except ValueError as error:
            raise ValueError(f"Not a hosts file: {error}. Received: {str(path)!r}. Try {EXAMPLE}.") from error

    @classmethod
    def given(cls, cluster: Mapping[str, Any] | Sequence[str]) -> Hosts:
        """Addresses, or what a hosts file holds. Raises ValueError for anything else."""
        try:
            return cls._of(cluster if isinstance(cluster, Mapping) else {"workers": cluster})
        except ValueError as error:
            raise ValueError(f"Not a cluster: {error}. Received: {cluster!r}. Try {EXAMPLE}.") from error

    @classmethod
    def of_tf_config(cls, text: str) -> Hosts:
        """The job ``worker`` of what the environment variable TF_CONFIG holds. Raises ValueError for anything else."""
        try:
            return cls._of(_tf_config(text)["cluster"])
        except ValueError as error:
            raise ValueError(
                f"Not a cluster in TF_CONFIG: {error}. Received: TF_CONFIG={text!r}. {OF_TF_CONFIG}"
            ) from error

    @classmethod
    def _of(cls, data: Any) -> Hosts:
        """``workers``, or TensorFlow's own name of the job."""
        if not isinstance(data, Mapping):
            raise ValueError(f"it is {data!r}, not an object with workers")
        named = [key for key in ("workers", "worker") if key in data]
        others = [str(key) for key in data if key not in ("workers", "worker", "chief", "evaluator", "ps")]
        if len(named) != 1 or others:
            raise ValueError(f"it has workers, not {', '.join(others)}" if others else "no workers")
        addresses = data[named[0]]
        if isinstance(addresses, Mapping):  # TensorFlow's form where tasks may be left out
            addresses = _in_order(named[0], addresses)
        if isinstance(addresses, str) or not isinstance(addresses, Sequence):
            raise ValueError(f"{named[0]}: {addresses!r} is not a list of addresses")
        return cls(tuple(addresses))


def task_of_tf_config(text: str) -> int | None:
    """Which worker a process is by its TF_CONFIG; None where that does not say. Raises ValueError for a wrong one."""
    try:
        task = _tf_config(text).get("task", {})
    except ValueError as error:
        raise ValueError(
            f"Not a cluster in TF_CONFIG: {error}. Received: TF_CONFIG={text!r}. {OF_TF_CONFIG}"
        ) from error
    index = str(task.get("index", 0)) if isinstance(task, Mapping) else ""
    if not index.isdecimal():
        raise ValueError(f"task: {task!r} is not a type and an index. Received: TF_CONFIG={text!r}. Try index: 0.")
    return int(index) if task.get("type") == "worker" and "index" in task else None


def _in_order(name: str, addresses: Mapping[Any, Any]) -> list[Any]:
    """Of tasks by their numbers, which JSON writes as strings, and in any order."""
    by_task = {str(task): address for task, address in addresses.items()}
    numbers = [str(n) for n in range(len(by_task))]
    if by_task.keys() != {*numbers}:
        raise ValueError(f"{name}: tasks are numbered from 0 without gaps, not {', '.join(by_task)}")
    return [by_task[n] for n in numbers]


def _tf_config(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(data, dict) or "cluster" not in data:
        raise ValueError("no cluster")
    return data


def process(module: str, *arguments: object, python: Sequence[str] = (), root: str = ROOT) -> list[str]:
    """The command of a process that calls ``main`` of a module of this package.

    Args:
        module: its name.
        arguments: of the command line.
        python: the command of Python; by default this process' one.
        root: the folder with the package, if Python does not find it there by itself; empty for one that it finds.
    """
    return [*(python or [sys.executable]), "-c", MAIN, root, module, *map(str, arguments)]


def worker(*arguments: object, python: Sequence[str] = (), root: str = ROOT) -> list[str]:
    """The command of a worker, with these arguments of ``pipetrain worker``; see ``process``."""
    return process("pipetrain.cli.main", "worker", *arguments, python=python, root=root)


def launched_worker(
    port: int, cpu_devices: int, gone_s: float, *more: object, python: Sequence[str] = (), root: str = ROOT
) -> list[str]:
    """The command of a worker that ends with who has started it, or when its controller has gone for so long."""
    ends = ("--attended", "--on-controller-gone", "end", "--gone-after", gone_s)
    return worker("--port", port, "--cpu-devices", cpu_devices, *ends, *more, python=python, root=root)
