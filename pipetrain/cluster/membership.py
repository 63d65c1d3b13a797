"""Which worker a process is that a scheduler has started, and lists of hosts' names as schedulers write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipetrain.cluster.hosts import Hosts, is_ipv6, split, task_of_tf_config, with_port

PORT = 2222
SLURM_PORTS = range(20000, 30000)  # a job's first port, by its number: jobs of several users share a node
# A process' number among those that were started together, how many there are, and what all of them are called.
RANKS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"),
    "MPI": ("PMI_RANK", "PMI_SIZE", ""),
    "Kubernetes": ("JOB_COMPLETION_INDEX", "", ""),
}


class Member(NamedTuple):
    """One of the processes that a scheduler has started.

    Attributes:
        scheduler: its name, for messages.
        addresses: of all workers, ``host:port``, in the order of the processes.
        number: which of them this process is, from 0.
        job: what tells them from other jobs' that may listen at the same addresses: the scheduler's number, or where
            there is none the first worker's address, which no two jobs have at a time.
    """

    scheduler: str
    addresses: tuple[str, ...]
    number: int
    job: str

    @property
    def address(self) -> str:
        """Its own."""
        return self.addresses[self.number]

    @property
    def is_named(self) -> bool:
        """Whether the job has the scheduler's number, which no other has had."""
        return self.job != self.addresses[0]


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
    for scheduler, (rank, size, job) in RANKS.items():
        if environment.get(rank, "").isdecimal():
            addresses = _of_ranks(scheduler, environment[rank], environment.get(size), hosts, port or PORT)
            return _member(scheduler, addresses, int(environment[rank]), environment.get(job))
    return None


def expanded(text: str, given_by: str = "--hosts") -> list[str]:
    """Hosts' names, of which several may be written as one: ``a,b``, ``node[1-3,7]``, ``pod-[0-1].train``.

    IPv6 addresses are as they are: ``fd00::1``, ``[fd00::1]``, ``[fd00::1]:2222``.

    Raises ValueError, with what has given the text, for what is no list of names.
    """
    try:
        return [name for part in re.split(r",(?![^\[]*\])", text) for name in _expanded(part.strip())]
    except ValueError as error:
        raise ValueError(
            f"Hosts are names with commas between, but {error}. Received: {given_by} {text!r}. Try a,b or node[1-3,7]."
        ) from error


def _expanded(part: str) -> list[str]:
    if re.fullmatch(r"\[[^\[\]]*:[^\[\]]*\](:\d+)?", part):
        if not is_ipv6(part[1 : part.index("]")]):
            raise ValueError(f"{part} holds no IPv6 address")
        return [part]
    match = re.fullmatch(r"([^\[\]]*)(?:\[([^\[\]]*)\](.*))?", part)
    if match is None:
        raise ValueError(f"brackets do not match in {part}")
    before, spans, after = match.groups()
    if spans is None:
        if not part or part[0] in "-@" or part[-1] == "@" or re.search(r"\s", part):
            raise ValueError(f"{part!r} is none" if part else "one is empty")
        return [part]
    found = []
    for each in spans.split(","):
        span = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", each)
        if span is None:
            raise ValueError(f"{each!r} is no number, and no two with a hyphen between")
        first, last = span[1], span[2] or span[1]
        if int(last) < int(first):
            raise ValueError(f"{each.strip()} counts down")
        for n in range(int(first), int(last) + 1):
            found += _expanded(f"{before}{str(n).zfill(len(first))}{after}")
    return found


def without_port(host: str) -> str:
    """A host's name, or its address without brackets. Raises ValueError for one that has a port."""
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in host and not is_ipv6(bare.rpartition("@")[2]):
        raise ValueError(f"{host} has a port")
    return bare


def _of_slurm(environment: Mapping[str, str], port: int | None) -> Member:
    job = environment["SLURM_JOB_ID"]
    needed = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID"
    if not all(environment.get(name) for name in needed):
        raise ValueError(
            f"This is job {job} of Slurm, and none of its steps: only this process was started. Received: "
            f"{environment.get('SLURM_NNODES', 'some')} nodes. Try srun pipetrain launch ..., or --local N."
        )
    first = port or SLURM_PORTS[int(job) % len(SLURM_PORTS)]
    nodes = expanded(environment["SLURM_STEP_NODELIST"], "SLURM_STEP_NODELIST")
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):  # such as 2(x3),1
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    addresses = [with_port(node, first + n) for node, count in zip(nodes, counts, strict=False) for n in range(count)]
    return _member(
        "Slurm", addresses, int(environment["SLURM_PROCID"]), f"{job}.{environment.get('SLURM_STEP_ID', '')}"
    )


def _of_ranks(scheduler: str, number: str, size: str | None, hosts: Sequence[str], port: int) -> list[str]:
    """The workers' addresses."""
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
        try:
            bare = without_port(host)
        except ValueError:  # its port is given
            addresses.append(host)
        else:
            addresses.append(with_port(bare, port + used.get(bare, 0)))
            used[bare] = used.get(bare, 0) + 1
        try:
            split(addresses[-1])
        except ValueError as error:
            raise ValueError(
                f"Not a host: {error}. Received: --hosts with {host}. Try a,b or [fd00::1],b:3000."
            ) from error
    return addresses


def _member(scheduler: str, addresses: Sequence[str], number: int, job: str | None = None) -> Member:
    workers = Hosts(tuple(addresses)).workers
    if not 0 <= number < len(workers):
        raise ValueError(
            f"There is no such worker. Received: {scheduler} says number {number} of {', '.join(workers)}. "
            f"Try one from 0 to {len(workers) - 1}."
        )
    return Member(scheduler, workers, number, job or workers[0])
