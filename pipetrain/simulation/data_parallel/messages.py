"""Messages between devices in simulated time: ports that they share, and the order in which a phase sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pipetrain.schemes.transfers.plan import Phase
from pipetrain.simulation.data_parallel.clock import Happens, SimulatedClock, SimulatedDevice
from pipetrain.simulation.data_parallel.setting import Setting
from pipetrain.simulation.network import Network, Route
from pipetrain.trace.records import Transfer, What


class SimulatedMessage:
    """A message: from when it leaves to when it has arrived, and to when it is used first."""

    __slots__ = ("arrived_s", "left_s", "pack", "sink", "size_bytes", "source", "step", "used_s", "what")

    def __init__(self, what: What, step: int, pack: int, source: int, sink: int, size_bytes: float) -> None:
        self.what, self.step, self.pack = what, step, pack
        self.source, self.sink, self.size_bytes = source, sink, size_bytes
        self.left_s = self.arrived_s = self.used_s = 0.0

    @property
    def transfer(self) -> Transfer:
        """As a trace has it."""
        kept_s = max(0.0, self.used_s - self.arrived_s)
        ends = 0, self.source, 0, self.sink
        return Transfer(
            self.what, self.step, *ends, round(self.size_bytes), self.left_s, self.arrived_s, self.pack, kept_s
        )


class Ports:
    """Carries messages over a cluster's links. Whatever these are, a device has one port.

    A port takes in one message at a time and sends out one. What leaves one medium, such as a port, goes through the
    next one at the same time if that is free, and else waits before it, without keeping the first one from others: as
    in a switch. A device has one connection to each other one, on which an acknowledgement, of no bytes, is there after
    all that was sent before it; what goes to others does not keep it, since connections share a port.

    Args:
        clock: of the simulation.
        setting: the workers.
        devices: theirs, which messages keep from computing at either end.
    """

    def __init__(self, clock: SimulatedClock, setting: Setting, devices: Sequence[SimulatedDevice]) -> None:
        self.clock, self._work, self._devices = clock, setting.message_work, devices
        self._network = Network(setting.cluster)
        self._routes: dict[tuple[int, int], Route] = {}
        # Of each connection the messages under way, the first to arrive first, with what happens just after each.
        self._under_way: dict[tuple[int, int], deque[list[Happens]]] = {}

    def send(self, source: int, sink: int, size_bytes: float, arrives: Happens) -> None:
        """Send it now; ``arrives`` happens when it is there."""
        work_s = self._work.seconds(size_bytes)
        self._devices[source].disturb(work_s)
        connection = self._under_way.setdefault((source, sink), deque())
        connection.append([])

        def arrived() -> None:
            self._devices[sink].disturb(work_s)
            arrives()
            for acknowledgement in connection.popleft():
                acknowledgement()

        self._enter(self._route(source, sink), 0, size_bytes, self.clock.now, arrived)

    def _enter(self, route: Route, place: int, size_bytes: float, left_s: float, arrives: Happens) -> None:
        """The message comes to one of its media; it has left the one before then."""
        free_at, medium = self._network.free_at, route.media[place]
        start_s = max(self.clock.now, free_at[medium])
        end_s = free_at[medium] = max(left_s, start_s + size_bytes / route.bandwidth_bytes_per_s)
        if place + 1 < len(route.media):
            self.clock.at(start_s, lambda: self._enter(route, place + 1, size_bytes, end_s, arrives))
        else:
            self.clock.at(end_s + route.latency_s, arrives)

    def acknowledge(self, message: SimulatedMessage, arrives: Happens) -> None:
        """Tell the sender of a message, behind what its receiver is sending to it at the time."""
        there_s = self.clock.now + self._route(message.sink, message.source).latency_s
        connection = self._under_way.get((message.sink, message.source))
        if connection:
            connection[-1].append(lambda: self.clock.at(max(self.clock.now, there_s), arrives))
        else:
            self.clock.at(there_s, arrives)

    def _route(self, source: int, sink: int) -> Route:
        if (source, sink) not in self._routes:
            route, medium = self._network.route(source, sink), self._network.medium
            out, into = medium("device", "out", source), medium("device", "in", sink)
            self._routes[source, sink] = route._replace(media=(out, *route.media, into))
        return self._routes[source, sink]


class Flow:
    """The messages of a phase's packs, of which so many packs are under way at a time.

    ``messages`` are those that have left, in that order. A pack of several messages is acknowledged by the receiver of
    the last of them.

    Args:
        ports: that carry them.
        phase: whose order they keep.
        expected: messages of each pack.
        together: they share the way, so that each is there when the last is: what all leave at once, and in no order.
    """

    def __init__(self, ports: Ports, phase: Phase, expected: int, together: bool = False) -> None:
        self._ports, self._awaited, self._together = ports, phase.awaited, together
        self._missing = [expected] * len(phase.packs)
        self._acknowledged = [False] * len(phase.packs)
        self._needed = {*phase.awaited}  # places of packs for whose acknowledgement others wait
        self._waiting: list[list[Happens]] = [[] for _ in phase.packs]
        self._held: list[Callable[[], None]] = []
        self._left = expected * len(phase.packs)
        self.messages: list[SimulatedMessage] = []

    def offer(self, place: int, message: SimulatedMessage, arrives: Happens, waits: bool = True) -> None:
        """A message of the pack at this place of the phase is ready; it ``waits`` for those before it."""
        before = self._awaited[place]
        if waits and before is not None and not self._acknowledged[before]:
            self._waiting[before].append(lambda: self._send(place, message, arrives))
        else:
            self._send(place, message, arrives)

    def _send(self, place: int, message: SimulatedMessage, arrives: Happens) -> None:
        message.left_s = self._ports.clock.now
        self.messages.append(message)
        self._ports.send(
            message.source, message.sink, message.size_bytes, lambda: self._arrived(place, message, arrives)
        )

    def _arrived(self, place: int, message: SimulatedMessage, arrives: Happens) -> None:
        self._missing[place] -= 1
        self._left -= 1
        if not self._missing[place] and place in self._needed:
            self._ports.acknowledge(message, lambda: self._acknowledge(place))
        self._held.append(lambda: self._deliver(message, arrives))
        if not self._together or not self._left:
            held, self._held = self._held, []
            for deliver in held:
                deliver()

    def _deliver(self, message: SimulatedMessage, arrives: Happens) -> None:
        message.arrived_s = message.used_s = self._ports.clock.now
        arrives()

    def _acknowledge(self, place: int) -> None:
        self._acknowledged[place] = True
        for send in self._waiting[place]:
            send()
