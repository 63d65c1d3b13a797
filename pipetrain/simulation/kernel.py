"""The kernel of all simulations: what happens in the order of time, and devices that compute and send in it."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipetrain.plan.cluster import NO_WORK, Cluster, devices_on_cores
from pipetrain.schemes.actions import Op
from pipetrain.schemes.arguments import checked_count, checked_from_zero
from pipetrain.simulation.costs import Network, Route
from pipetrain.trace.records import What

Happens = Callable[[], None]
Seconds = NDArray[np.float64]


def checked_seed(seed: int) -> int:
    """The argument; ValueError for what is no whole number from 0 up."""
    return checked_count("seed", seed, "Random numbers begin with a whole number from 0 up", 0, least=0)


def varying(slowdown: float, seed: int) -> Callable[[], float]:
    """Gives by how much longer each piece of work takes: random factors, lognormal with mean 1.

    ``slowdown`` is their standard deviation; without it all are 1. Raises ValueError for what neither can be.
    """
    checked_from_zero("slowdown", slowdown)
    sigma, rng = math.sqrt(math.log1p(slowdown**2)), np.random.default_rng(checked_seed(seed))
    return lambda: float(rng.lognormal(-(sigma**2) / 2, sigma)) if slowdown else 1.0


class SimulatedClock:
    """What is to happen and when.

    Of what happens at one time comes first what has the least number: ``at`` counts. A program that knows a better
    order pushes on the ``heap`` itself: times, numbers that differ at one time, and what happens.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.heap: list[tuple[float, int, Happens]] = []
        self._numbers = count()

    def at(self, time_s: float, happens: Happens) -> None:
        """Let it happen then."""
        heappush(self.heap, (time_s, next(self._numbers), happens))

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self.heap
        while heap:
            self.now, _, happens = heappop(heap)
            happens()


class Processors:
    """So many devices of a cluster work at once, each on a core of its own; others wait, first come, first served."""

    def __init__(self, cluster: Cluster, devices: int) -> None:
        self._idle, self._queue = cluster.processors, deque[tuple[int, Happens]]()
        self._cores = _shared(cluster.cores[:devices]) if len(cluster.cores) >= devices else ()
        self._taken: dict[int, int] = {}  # cores that devices share, by the device that works on them
        self.are_enough = cluster.processors >= devices and not self._cores  # no device ever waits

    def take(self, device: int, then: Happens) -> None:
        """Take a processor, now or when there is one."""
        if self._is_begun(device):
            then()
        else:
            self._queue.append((device, then))

    def release(self, device: int) -> None:
        """Give it back, to who has waited longest of those who may have it."""
        self._idle += 1
        if self._cores:
            del self._taken[next(core for core in self._cores[device] if self._taken.get(core) == device)]
        for n, (waiting, then) in enumerate(self._queue):
            if self._is_begun(waiting):
                del self._queue[n]
                then()
                return

    def _is_begun(self, device: int) -> bool:
        if self._idle <= 0:
            return False
        if self._cores:
            core = next((core for core in self._cores[device] if core not in self._taken), None)
            if core is None:
                return False
            self._taken[core] = device
        self._idle -= 1
        return True

    def shared_core(self, device: int) -> int | None:
        """The one core that a device keeps to; None where it has several or they are not known."""
        own = self._cores[device] if self._cores else ()
        return own[0] if len(own) == 1 else None


def _shared(cores: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """Of each device its cores, those first that others need least; none if no device ever waits for one."""
    sets = Counter(map(frozenset, cores))
    are_apart = len(frozenset().union(*sets)) == sum(map(len, sets))
    if are_apart and all(len(own) >= devices for own, devices in sets.items()):
        return ()
    devices_on = devices_on_cores(cores)
    return [sorted(own, key=devices_on.__getitem__) for own in cores]


class DeviceWork(NamedTuple):
    """What a device did without a pause: an operation of a step."""

    device: int
    op: Op
    step: int
    start_s: float
    end_s: float


class SimulatedMessage:
    """A message from one device to another: when it left, when it had arrived, and when it was used first.

    ``what`` is None where a trace does not have it.
    """

    __slots__ = ("arrived_s", "left_s", "pack", "sink", "size_bytes", "source", "step", "used_s", "what")

    def __init__(self, what: What | None, step: int, source: int, sink: int, size_bytes: float, pack: int = 0) -> None:
        self.what, self.step, self.pack = what, step, pack
        self.source, self.sink, self.size_bytes = source, sink, size_bytes
        self.left_s = self.arrived_s = self.used_s = 0.0


class SimulatedCore:
    """The core of a device, or of several that share it: what messages take of it makes its work end later."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock, self._computes = clock, False
        self._delay_s = self._free_s = 0.0  # of what it does; when it is free of something else

    def disturb(self, seconds: float) -> None:
        """It is needed for so long for something else: what it does now, or next, ends later."""
        if self._computes:
            self._delay_s += seconds
        else:
            self._free_s = max(self._free_s, self._clock.now) + seconds

    def begin(self) -> None:
        """It computes from now on, and first what it is still needed for."""
        self._computes = True
        self._delay_s += max(0.0, self._free_s - self._clock.now)

    def end(self) -> float:
        """What it computes would be done now; gives the seconds that are left of what has disturbed it meanwhile."""
        delay_s, self._delay_s = self._delay_s, 0.0
        self._computes = delay_s > 0
        return delay_s


class SimulatedDevice:
    """Does what it is given, one thing after another: of what it has, that of the least priority number.

    Args:
        number: of the device.
        kernel: whose clock and processors it has.
        core: that it computes on, maybe with others.
        factor: gives by how much longer each piece of work takes.
        speed: by which the seconds of all its work are divided.
    """

    def __init__(
        self, number: int, kernel: Kernel, core: SimulatedCore, factor: Callable[[], float], speed: float = 1.0
    ) -> None:
        self._number, self._core, self._factor, self._speed = number, core, factor, speed
        self._clock, self._processors, self._work = kernel.clock, kernel.processors, kernel.work
        self._queue: list[tuple[int, int, float, Op, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._busy = False
        self.disturb = core.disturb

    def do(self, seconds: float, op: Op, step: int, then: Callable[[float], None], priority: int = 0) -> None:
        """Work for so long; ``then`` is told when that began. Of equal priority numbers the first given comes first."""
        heappush(self._queue, (priority, next(self._numbers), seconds, op, step, then))
        self._go_on()

    def _go_on(self) -> None:
        if self._queue and not self._busy:
            self._busy = True
            _, _, seconds, op, step, then = heappop(self._queue)
            self._processors.take(self._number, partial(self._begin, seconds, op, step, then))

    def _begin(self, seconds: float, op: Op, step: int, then: Callable[[float], None]) -> None:
        start_s = self._clock.now
        self._core.begin()
        self._clock.at(start_s + seconds * self._factor() / self._speed, partial(self._done, start_s, op, step, then))

    def _done(self, start_s: float, op: Op, step: int, then: Callable[[float], None]) -> None:
        delay_s = self._core.end()
        if delay_s:
            self._clock.at(self._clock.now + delay_s, partial(self._done, start_s, op, step, then))
            return
        self._work.append(DeviceWork(self._number, op, step, start_s, self._clock.now))
        self._processors.release(self._number)
        self._busy = False
        then(start_s)
        self._go_on()


class Ports:
    """Carries messages over a cluster's links. Whatever these are, a device has one port.

    A port takes in one message at a time and sends out one. Where ports are ``switched``, what leaves one medium, such
    as a port, goes through the next one at the same time if that is free, and else waits before it, without keeping
    the first one from others; where not, a message begins when all its media are free. A device has one connection to
    each other one, on which an acknowledgement, of no bytes, is there after all that was sent before it; what goes to
    others does not keep it, since connections share a port.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        cluster: Cluster,
        devices: Sequence[SimulatedDevice],
        switched: bool,
    ) -> None:
        self._clock, self._network, self._switched = clock, Network(cluster), switched
        self._devices, self._work, self._disturbing = devices, cluster.message_work, cluster.message_work != NO_WORK
        self._routes: dict[tuple[int, int], Route] = {}
        # Of each connection the messages under way, the first to arrive first, with what happens just after each.
        self._under_way: dict[tuple[int, int], deque[list[Happens]]] = {}

    def send(self, message: SimulatedMessage, arrives: Happens) -> None:
        """Send it now; ``arrives`` happens when it is there."""
        message.left_s = now = self._clock.now
        ends = message.source, message.sink
        if self._disturbing:
            self._devices[message.source].disturb(self._work.seconds(message.size_bytes))
        connection = self._under_way.get(ends)
        if connection is None:
            connection = self._under_way[ends] = deque()
        connection.append([])
        route, arrived = self._route(*ends), partial(self._arrived, message, connection, arrives)
        if self._switched:
            self._enter(route, 0, message.size_bytes, now, arrived)
        else:
            self._clock.at(self._network.send(route, message.size_bytes, now), arrived)

    def acknowledge(self, source: int, sink: int, arrives: Happens) -> None:
        """Tell the source of a message that its sink has it, behind what that is sending to the source at the time."""
        there_s = self._clock.now + self._route(sink, source).latency_s
        connection = self._under_way.get((sink, source))
        if connection:
            connection[-1].append(lambda: self._clock.at(max(self._clock.now, there_s), arrives))
        else:
            self._clock.at(there_s, arrives)

    def _enter(self, route: Route, place: int, size_bytes: float, left_s: float, arrives: Happens) -> None:
        """The message comes to one of its media; it has left the one before then."""
        free_at, medium = self._network.free_at, route.media[place]
        start_s = max(self._clock.now, free_at[medium])
        end_s = free_at[medium] = max(left_s, start_s + size_bytes / route.bandwidth_bytes_per_s)
        if place + 1 < len(route.media):
            self._clock.at(start_s, partial(self._enter, route, place + 1, size_bytes, end_s, arrives))
        else:
            self._clock.at(end_s + route.latency_s, arrives)

    def _arrived(self, message: SimulatedMessage, connection: deque[list[Happens]], arrives: Happens) -> None:
        if self._disturbing:
            self._devices[message.sink].disturb(self._work.seconds(message.size_bytes))
        message.arrived_s = message.used_s = self._clock.now
        arrives()
        for acknowledgement in connection.popleft():
            acknowledgement()

    def _route(self, source: int, sink: int) -> Route:
        if (source, sink) not in self._routes:
            route, medium = self._network.route(source, sink), self._network.medium
            out, into = medium("device", "out", source), medium("device", "in", sink)
            self._routes[source, sink] = route._replace(media=(out, *route.media, into))
        return self._routes[source, sink]


class Kernel:
    """Devices that compute and send, and the journal of that: ``work`` and ``messages``, in the order of time.

    Args:
        cluster: how the devices are joined, how many work at once and how fast, and what messages and the calling
            program take of their processors.
        factors: of each device, what gives by how much longer each piece of work takes.
        switched: how messages go through several media, see ``Ports``.
    """

    def __init__(
        self,
        cluster: Cluster,
        factors: Sequence[Callable[[], float]],
        switched: bool = True,
    ) -> None:
        self.clock, self.processors = SimulatedClock(), Processors(cluster, len(factors))
        self.work: list[DeviceWork] = []
        self.messages: list[SimulatedMessage] = []
        shared = [self.processors.shared_core(number) for number, _ in enumerate(factors)]
        cores = {core: SimulatedCore(self.clock) for core in shared if core is not None}
        own = [SimulatedCore(self.clock) if core is None else cores[core] for core in shared]
        self.devices = [
            SimulatedDevice(number, self, core, factor, cluster.speed(number))
            for number, (core, factor) in enumerate(zip(own, factors, strict=True))
        ]
        self._called: dict[SimulatedCore, float] = {}  # what the calling program takes of each core in a step
        for core, work_s in zip(own, cluster.caller_work_s, strict=False):
            self._called[core] = max(work_s, self._called.get(core, 0.0))
        self.ports = Ports(self.clock, cluster, self.devices, switched)

    def call(self) -> None:
        """The calling program begins a step, and takes what it needs of the processors."""
        for core, work_s in self._called.items():
            core.disturb(work_s)

    def send(self, message: SimulatedMessage, arrives: Happens) -> None:
        """A message leaves now; ``arrives`` happens when it is there."""
        self.messages.append(message)
        self.ports.send(message, arrives)


class Journal:
    """What happened in the order of time: the ``numbers`` of what it happened to, and so many seconds of each event.

    One array for all, and not one for each, is what the processor's caches are made for.
    """

    def __init__(self, width: int = 1) -> None:
        self.numbers = array("i")
        self.seconds = [array("d") for _ in range(width)]

    def note(self, number: int, now: float) -> None:
        """Write down one event."""
        self.numbers.append(number)
        self.seconds[0].append(now)

    def of_each(self, count: int) -> list[list[Seconds]]:
        """For each column of seconds: those of each of so many numbers, in the order of time."""
        numbers = np.frombuffer(self.numbers, dtype=np.int32)
        small = numbers.astype(np.uint16) if count <= 1 << 16 else numbers  # which are sorted by radix
        order = np.argsort(small, kind="stable")
        ends = np.cumsum(np.bincount(numbers, minlength=count))[:-1]
        return [np.split(np.frombuffer(each)[order], ends) for each in self.seconds]


class SimulationRecord(NamedTuple):
    """What happened, in the order of time, by the numbers of stations and wires.

    When each action started and had computed; when the gradients of each minibatch were reduced, where they were, and
    the weights updated; when each message arrived.
    """

    start_s: list[Seconds]
    computed_s: list[Seconds]
    updated_s: list[Seconds]
    reduced_s: list[Seconds]
    arrived_s: list[Seconds]
