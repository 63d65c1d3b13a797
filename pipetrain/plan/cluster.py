"""The devices that stages are placed on: their links and their memory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipetrain.schemes.transfers.plan import Message

NO_WORK = Message()
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Link:
    """A connection between devices: ``seconds = latency_s + bytes / bandwidth_bytes_per_s``."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, size_bytes: Any) -> Any:
        """The time of one transfer."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s

    def reduce_seconds(self, size_bytes: Any, replicas: int) -> Any:
        """The time in which replicas sum as many bytes of gradients each, every one a part, and share the sums.

        ``2 * (r-1) * latency + 2 * (r-1)/r * bytes / bandwidth``: what each device sends, as in a ring.
        """
        if replicas == 1:
            return 0.0
        return 2 * (replicas - 1) * (self.latency_s + size_bytes / replicas / self.bandwidth_bytes_per_s)

    def exchange_seconds(self, size_bytes: Any, replicas: int) -> Any:
        """The time in which replicas send so many bytes each to all others: ``latency + (r-1) * bytes / bandwidth``."""
        if replicas == 1:
            return 0.0
        return self.latency_s + (replicas - 1) * size_bytes / self.bandwidth_bytes_per_s


# PCIe 3.0 x16 carries 15.75 GB/s; about three quarters of it reach a tensor copy.
PCIE_3 = Link(bandwidth_bytes_per_s=12e9, latency_s=10e-6)
# Logical devices of one processor: a tensor changes hands, the few bytes that describe it are all that moves.
SHARED_MEMORY = Link(bandwidth_bytes_per_s=math.inf)


CONTENTION = ("none", "port", "bus")


@dataclass(frozen=True)
class Level:
    """Groups of so many devices, joined by one link; the outermost level is one group of any size.

    ``contention`` is what transfers within a group share in the simulation; the planner's cost model has no contention:

    - ``none``: nothing. From each device to each other there is a link, with one transfer at a time.
    - ``port``: a switch. Each member of the group, a device or a whole group of the level before, has one port, of
      which either direction carries one transfer at a time.
    - ``bus``: one medium, with one transfer at a time in all the group.

    Raises ValueError for another contention.
    """

    link: Link
    devices: float = math.inf
    contention: str = CONTENTION[0]

    def __post_init__(self) -> None:
        if self.contention not in CONTENTION:
            raise ValueError(
                f"Unknown contention. Received: contention={self.contention!r}. Try one of: {', '.join(CONTENTION)}."
            )


@dataclass(frozen=True)
class Cluster:
    """Devices numbered from 0, in groups of groups: such as 4 on a host over PCIe, hosts over 10 Gb/s.

    Args:
        levels: innermost first. Each one's groups hold whole groups of the one before.
        memory_bytes: the memory of every device; None for no limit.
        processors: how many devices work at once: logical CPU devices share the processor's cores.
        between: the link between each two devices by their numbers, where they were measured; None where the levels
            say it.
        overhead_s: seconds that every action, a forward or a backward, takes on a device in addition to its computing,
            such as for a call to another process.
        call_s: seconds that a minibatch's call of all devices takes beside its actions, unless calls of asynchronous
            pipelines, of several minibatches, follow each other.
        message_work: seconds of either end's processor that a message takes, beside its way: what that computes ends
            so much later. Counted where gradients or layers' outputs are exchanged between all devices, not for what
            crosses a pipeline's cuts.
        cores: of each device the numbers of the processor cores that it may work on, where these are known: devices
            that keep to the same core wait for each other though another core has nothing to do.
        speeds: of each device how fast it computes while all do, 1 being the first one's speed alone, at which models
            are profiled; none: all compute at that. Not counted of ways on fewer devices, nor where to cut.
        caller_work_s: of each device the seconds of its processor that the calling program takes in each step while
            devices compute; none: it takes nothing. Counted where ``message_work`` is; and the step of a synchronous
            pipeline on all of them is longer by what it takes of the device of which it takes most.

    Raises ValueError for groups that do not nest, for a device without a core where cores are known, for speeds that
    are not above 0 and for work below 0.
    """

    levels: tuple[Level, ...] = (Level(PCIE_3),)
    memory_bytes: int | None = None
    processors: float = math.inf
    between: tuple[tuple[Link, ...], ...] | None = None
    overhead_s: float = 0.0
    call_s: float = 0.0
    message_work: Message = NO_WORK
    cores: tuple[tuple[int, ...], ...] = ()
    speeds: tuple[float, ...] = ()
    caller_work_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        sizes = [level.devices for level in self.levels]
        nested = all(
            a >= 1 and b > a and (b == math.inf or b % a == 0)
            for a, b in zip([1, *sizes], sizes, strict=False)
            if b != 1
        )
        if not sizes or not nested:
            raise ValueError(
                f"Every level of a cluster holds whole groups of the level before. Received: devices={sizes}. "
                "Try 4 devices a host, then any number of hosts: levels of 4 devices and of no number."
            )
        if not all(self.cores):
            raise ValueError(
                f"A device works on a core at least. Received: cores={self.cores}. Try cores=(), for not known."
            )
        if not all(0 < speed < math.inf for speed in self.speeds):
            raise ValueError(f"A device computes at a speed above 0. Received: speeds={self.speeds}. Try speeds=().")
        if not all(0 <= work_s < math.inf for work_s in self.caller_work_s):
            raise ValueError(
                "The calling program takes a number of seconds from 0 up. "
                f"Received: caller_work_s={self.caller_work_s}. Try caller_work_s=()."
            )

    def link(self, first: int, last: int) -> Link:
        """The link that joins devices ``first`` to ``last``: the innermost level's that has both in one group."""
        if self.between is not None and max(first, last) < len(self.between):
            return self.between[first][last]
        return self.levels[self.depth(first, last)].link

    def slowest(self, devices: int) -> Link:
        """Of the links between the first device and the others of so many, two at least, the slowest for 1 MB."""
        return max((self.link(0, n) for n in range(1, devices)), key=lambda link: link.seconds(1e6))

    def crowding(self, devices: int) -> float:
        """How many devices share the fullest processor, of so many that all compute; 1 where none has to wait."""
        if len(self.cores) < devices:
            return max(1.0, devices / self.processors)
        return max(1.0, *devices_on_cores(self.cores[:devices]).values())

    def speed(self, device: int) -> float:
        """How fast this device computes while all do."""
        return self.speeds[device] if device < len(self.speeds) else 1.0

    def speeds_of(self, devices: int) -> tuple[float, ...]:
        """How fast each of so many devices computes while these do: as one alone where others are idle."""
        return tuple(map(self.speed, range(devices))) if devices >= len(self.speeds) else (1.0,) * devices

    def with_program(self) -> Cluster:
        """The cluster with the calling program as one more device, before the others, where these are known one by one.

        It is joined to each of them as the first of them is, and computes on any of their cores.
        """
        between, cores = self.between, self.cores
        if between:
            first = between[0]
            between = ((first[0], *first), *((row[0], *row) for row in between))
        return replace(
            self,
            between=between,
            cores=((*sorted({core for own in cores for core in own}),), *cores) if cores else (),
            speeds=(1.0, *self.speeds) if self.speeds else (),
            caller_work_s=(0.0, *self.caller_work_s) if self.caller_work_s else (),
        )

    def calls_s(self, devices: int) -> float:
        """Seconds that a synchronous minibatch on so many devices takes for its call, and for the program's work.

        The latter are none on fewer devices than it is known of: those that have nothing to do leave cores to it.
        """
        work_s = self.caller_work_s if devices >= len(self.caller_work_s) else ()
        return self.call_s + max(work_s, default=0.0)

    def holds(self, size_bytes: float) -> bool:
        """Whether so much fits the memory of a device."""
        return self.memory_bytes is None or size_bytes <= self.memory_bytes

    def depth(self, first: int, last: int) -> int:
        """Which level that is, from 0, the innermost, up."""
        for depth, level in enumerate(self.levels):
            if level.devices == math.inf or first // level.devices == last // level.devices:
                return depth
        return len(self.levels) - 1

    def starts(self, free: int) -> list[int]:
        """Where a stage may start when devices up to ``free`` are taken: there, or at the next group of a level."""
        groups = [int(level.devices) for level in self.levels if level.devices != math.inf]
        return sorted({free, *(-(-free // size) * size for size in groups)})

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file: JSON such as

        ``{"memory": "16GiB", "levels": [{"devices": 4, "bandwidth": "12GB/s", "latency_us": 10},
        {"bandwidth": "10Gb/s", "latency_us": 50}]}``

        Raises ValueError, with what is wrong, for anything else; OSError when it cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            levels, memory = [_level(**level) for level in data.pop("levels")], data.pop("memory", None)
            if data:
                raise ValueError(f"it has levels and memory, not {', '.join(data)}")
            if levels and levels[-1].devices != math.inf:
                raise ValueError("the last level joins all that there is, and has no number of devices")
            return cls(tuple(levels), None if memory is None else size_bytes(str(memory)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error).removeprefix("_level() ")
            raise ValueError(
                f"Not a cluster file: {what.split(' Received:')[0].rstrip('.')}. Received: {str(path)!r}. Try "
                '{"memory": "16GiB", "levels": [{"devices": 4, "bandwidth": "12GB/s"}, {"bandwidth": "10Gb/s"}]}.'
            ) from error


def devices_on_cores(cores: Iterable[Sequence[int]]) -> dict[int, float]:
    """How many devices compute on each core, of devices with these cores; one that has several is part of each."""
    found: dict[int, float] = {}
    for own in cores:
        for core in own:
            found[core] = found.get(core, 0.0) + 1 / len(own)
    return found


def _level(
    bandwidth: str, devices: float = math.inf, latency_us: float = 0.0, contention: str = CONTENTION[0]
) -> Level:
    if isinstance(devices, bool) or not (devices == math.inf or isinstance(devices, int)):
        raise ValueError(f"devices are counted, not {devices!r}")
    if isinstance(latency_us, bool) or not isinstance(latency_us, (int, float)) or not 0 <= latency_us < math.inf:
        raise ValueError(f"latency_us is a number of microseconds from 0 up, not {latency_us!r}")
    return Level(Link(bandwidth_bytes_per_s(bandwidth), latency_us * 1e-6), devices, contention)


def size_bytes(text: str) -> int:
    """``16GiB``, ``512MiB``, ``2GB`` or plain bytes; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 16GiB")
    return int(float(match[1]) * UNITS[match[2]])


def bandwidth_bytes_per_s(text: str) -> float:
    """``12GB/s``, ``10Gb/s`` (a small b: bits); ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGTK]i?|)([bB])/s", str(text).strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a bandwidth such as 12GB/s for bytes or 10Gb/s for bits")
    return float(match[1]) * UNITS[match[2].lower()] / (8 if match[3] == "b" else 1)
