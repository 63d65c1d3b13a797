"""Which worker of a group this process is, where a scheduler has started one process for each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipetrain.cluster.hosts import Hosts, split, task_of_tf_config, with_port

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
    if environment.get("TF_CONFIG"):
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
