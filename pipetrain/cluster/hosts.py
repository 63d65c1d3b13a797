"""The workers of a cluster by their addresses: what a hosts file, a scheduler or a program says of them."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

NAMES = "PIPETRAIN_WORKER_NAMES"  # the hosts of addresses, as JSON
EXAMPLE = '{"workers": ["10.0.0.1:2222", "10.0.0.2:2222"]}'


def split(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``, or of ``[host]:port`` for an IPv6 address; ValueError for anything else."""
    match = re.fullmatch(r"([\w.-]+|\[([0-9a-fA-F:.]+)\]):(\d{1,5})", address) if isinstance(address, str) else None
    if match is None or not 0 < int(match[3]) < 2**16 or not (match[2] is None or _is_ipv6(match[2])):
        raise ValueError(
            f"{address!r} is not an address such as 10.0.0.1:2222 or [fd00::1]:2222, with a port from 1 to {2**16 - 1}"
        )
    return match[2] or match[1], int(match[3])


def named(address: str) -> str:
    """A worker's address with the name of its host before it, if the launcher that started it has told that."""
    name = json.loads(os.environ.get(NAMES) or "{}").get(address)
    return f"{name} ({address})" if name else address


def with_port(host: str, port: int) -> str:
    """``host:port``, with the brackets of an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_ipv6(text: str) -> bool:
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
                f"Not a cluster in TF_CONFIG: {error}. Received: TF_CONFIG={text!r}. "
                'Try {"cluster": {"worker": ["10.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}.'
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
    task = _tf_config(text).get("task", {})
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
    data = json.loads(text)
    if not isinstance(data, dict) or "cluster" not in data:
        raise ValueError("no cluster")
    return data


PORT = 2222
SLURM_PORTS = range(20000, 30000)  # a job's first port, by its number: jobs of several users share a node
# A process' number among those that were started together, and how many there are.
RANKS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPI": ("PMI_RANK", "PMI_SIZE"),
    "Kubernetes": ("JOB_COMPLETION_INDEX", ""),
}


class Member(NamedTuple):
    """One of the processes that a scheduler has started.

    Attributes:
        scheduler: its name, for messages.
        addresses: of all workers, ``host:port``, in the order of the processes.
        number: which of them this process is, from 0.
    """

    scheduler: str
    addresses: tuple[str, ...]
    number: int

    @property
    def address(self) -> str:
        """Its own."""
        return self.addresses[self.number]


def member_of(environment: Mapping[str, str], hosts: Sequence[str] = (), port: int | None = None) -> Member | None:
    """What the environment variables of TF_CONFIG, Slurm, MPI or Kubernetes say of this process; None without any.

    Args:
        environment: the variables.
        hosts: of all processes, in their order, which MPI and Kubernetes do not tell.
        port: of the first worker of a host; by default 2222, under Slurm one that depends on the job.

    Raises:
        ValueError: for variables that do not fit together, or hosts that are missing.
    """
    if environment.get("TF_CONFIG") and not hosts:
        text = environment["TF_CONFIG"]
        number = task_of_tf_config(text)
        if number is None:
            raise ValueError(f"TF_CONFIG names no worker. Received: TF_CONFIG={text!r}. Try a task of type worker.")
        return _member("TF_CONFIG", Hosts.of_tf_config(text).workers, number)
    if environment.get("SLURM_JOB_ID") and not hosts:
        return _of_slurm(environment, port)
    for scheduler, (rank, size) in RANKS.items():
        if environment.get(rank, "").isdecimal():
            return _of_rank(scheduler, int(environment[rank]), environment.get(size), hosts, port or PORT)
    return None


def expanded(text: str) -> list[str]:
    """Hosts' names, of which several may be written as one: ``a,b``, ``node[1-3,7]``, ``pod-[0-1].train``.

    Raises ValueError for brackets with something else in them.
    """
    found: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):  # commas outside of brackets
        match = re.fullmatch(r"([^\[\]]*)(?:\[([^\[\]]+)\]([^\]]*.*))?", part.strip())
        spans = (
            [re.fullmatch(r"(\d+)(?:-(\d+))?", each.strip()) for each in (match[2] or "0").split(",")]
            if match
            else [None]
        )
        if match is None or None in spans or not part.strip():
            raise ValueError(f"Hosts are names with commas between. Received: {text!r}. Try a,b or node[1-3,7].")
        if match[2] is None:
            found.append(match[1])
            continue
        for span in filter(None, spans):
            first, last = span[1], span[2] or span[1]
            for n in range(int(first), int(last) + 1):
                found += expanded(f"{match[1]}{str(n).zfill(len(first))}{match[3]}")
    return found


def _of_slurm(environment: Mapping[str, str], port: int | None) -> Member:
    job = environment["SLURM_JOB_ID"]
    needed = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID"
    if not all(environment.get(name) for name in needed):
        raise ValueError(
            f"This is job {job} of Slurm, and none of its steps: only this process was started. Received: "
            f"{environment.get('SLURM_NNODES', 'some')} nodes. Try srun pipetrain launch ..., or --local N."
        )
    first = port or SLURM_PORTS[int(job) % len(SLURM_PORTS)]
    nodes = expanded(environment["SLURM_STEP_NODELIST"])
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):  # such as 2(x3),1
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    addresses = [with_port(node, first + n) for node, count in zip(nodes, counts, strict=False) for n in range(count)]
    return _member("Slurm", addresses, int(environment["SLURM_PROCID"]))


def _of_rank(scheduler: str, number: int, size: str | None, hosts: Sequence[str], port: int) -> Member:
    if not hosts:
        raise ValueError(
            f"{scheduler} says which process this is, and not where the others are. Received: number {number}, no "
            "--hosts. Try --hosts a,b, the host of every process in their order."
        )
    if size and int(size) != len(hosts):
        raise ValueError(
            f"Each process has a host. Received: {size} processes of {scheduler}, {len(hosts)} --hosts. "
            "Try a host's name as often as it has processes."
        )
    addresses, used = [], dict[str, int]()
    for host in hosts:
        if ":" in host and not host.startswith("["):
            split(host)
            addresses.append(host)
        else:
            addresses.append(with_port(host.strip("[]"), port + used.get(host, 0)))
            used[host] = used.get(host, 0) + 1
    return _member(scheduler, addresses, number)


def _member(scheduler: str, addresses: Sequence[str], number: int) -> Member:
    workers = Hosts(tuple(addresses)).workers
    if not 0 <= number < len(workers):
        raise ValueError(
            f"There is no such worker. Received: {scheduler} says number {number} of {', '.join(workers)}. "
            f"Try one from 0 to {len(workers) - 1}."
        )
    return Member(scheduler, workers, number)
