"""The simulator's kernel: a heap of timed events, one for each action."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipetrain.schemes.validation import ScheduleError
from pipetrain.simulation.network import Network, Route

# What happens at an event, in the order of (time, kind * stations + station)
COMPUTED, READY, UPDATED, REDUCED = range(4)
NOTHING = -1
Arrivals = deque[float]
Seconds = NDArray[np.float64]
Due = list[tuple[float, int]]  # when a station has what it waits for, and which


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


class Record(NamedTuple):
    """What happened, in the order of time, by the numbers of stations and wires.

    When each action started and had computed; when the gradients of each minibatch were reduced, where they were, and
    the weights updated; when each message arrived.
    """

    start_s: list[Seconds]
    computed_s: list[Seconds]
    updated_s: list[Seconds]
    reduced_s: list[Seconds]
    arrived_s: list[Seconds]


class Work(NamedTuple):
    """What a station has to do: an action for each entry of ``order``, by codes.

    A code is ``microbatch * len(kinds) + kind``, where ``kinds`` are the operations of the station's stages, such as
    (F of stage 2, B of stage 2). ``compute_s`` are each kind's seconds for every microbatch of a minibatch in turn,
    ``inputs`` where each kind waits for what is sent (``NOTHING``: nowhere). ``updates`` and ``reports`` say of every
    entry of the order whether the stage's update follows it, and whether it ends the last stage's forwards of a
    minibatch.
    """

    kinds: list[tuple[int, str]]
    order: array[int]
    compute_s: list[float]
    inputs: list[int]
    updates: bytes
    reports: bytes


class Station:
    """One replica of a device's stages: what it has to do, and where it stands.

    ``update_s`` are the seconds of each kind's update, ``factors`` by how much longer each action takes, if it differs.
    """

    __slots__ = (
        "awaits", "compute_s", "device", "factors", "free_s", "inputs", "kinds", "number", "order", "outputs", "period",
        "place", "position", "reduction", "start_s", "update_s", "updating", "waits_at", "work",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        place: tuple[int, int],
        device: int,
        work: Work,
        update_s: list[float],
        factors: array[float] | None = None,
    ) -> None:
        self.number, self.place, self.device, self.work = number, place, device, work
        self.order, self.compute_s, self.waits_at = work.order, work.compute_s, work.inputs
        self.kinds, self.period = len(work.kinds), len(work.compute_s)
        self.update_s, self.factors = update_s, factors
        slots = 1 + max(work.inputs)
        self.inputs: list[list[Arrivals]] = [[] for _ in range(slots + 1)]  # the last one is NOTHING's: always empty
        self.outputs: list[list[Wire]] = [[] for _ in work.kinds]
        self.reduction: Reduction | None = None
        self.position, self.start_s, self.free_s, self.awaits, self.updating = 0, 0.0, 0.0, NOTHING, False


class Wire:
    """What one station sends another of one value of a stage, which waits in its ``slot``: first in, first out."""

    __slots__ = ("_free_at", "_media", "_microbatches", "arrivals", "holds_s", "latency_s", "number", "reader", "slot")

    def __init__(
        self, number: int, network: Network, route: Route, sizes: Sequence[int | None], reader: Station, slot: int
    ) -> None:
        """``sizes`` are the bytes of each microbatch of a minibatch, None where the stations share none of its rows."""
        self.number, self.reader, self.slot = number, reader, slot
        self.arrivals: Arrivals = deque()
        self._microbatches = len(sizes)
        self.holds_s = [NOTHING if size is None else size / route.bandwidth_bytes_per_s for size in sizes]
        self.latency_s, self._media, self._free_at = route.latency_s, route.media, network.free_at
        reader.inputs[slot].append(self.arrivals)

    def send(self, now: float, microbatch: int) -> float:
        """Begin a transfer as soon as its media are free: ``Network.send``, written out, as it is called so often."""
        hold_s = self.holds_s[microbatch % self._microbatches]
        if hold_s != NOTHING:
            free_at = self._free_at
            for medium in self._media:
                if free_at[medium] > now:
                    now = free_at[medium]
            now += hold_s
            for medium in self._media:
                free_at[medium] = now
            now += self.latency_s
        self.arrivals.append(now)
        return now


class Reduction(Protocol):
    """How the replicas of a stage sum their gradients.

    Both methods take the time, and give the stations that then know when they have what they wait for.
    """

    def enter(self, station: int, now: float) -> Due:
        """The station has its gradients."""

    def updated(self, station: int, now: float) -> Due:
        """The station has updated its weights."""


class Caller:
    """Posts minibatches, so many ahead of the results it has taken, each ``caller_s`` after a result.

    A result is there after so many ``reports`` of its minibatch. Everything posted arrives at once at all ``doors``.
    """

    def __init__(self, minibatches: int, microbatches: int, window: int, caller_s: float, reports: int) -> None:
        self.doors: list[Any] = []  # which times are appended to
        self._microbatches, self._caller_s, self._window, self._minibatches = (
            microbatches,
            caller_s,
            window,
            minibatches,
        )
        self._missing = [reports] * minibatches
        self._latest_s = [0.0] * minibatches
        self._taken, self._posted, self._now = 0, 0, 0.0

    def begin(self) -> None:
        """Post the first minibatches."""
        for _ in range(min(self._window, self._minibatches)):
            self._post()

    def report(self, minibatch: int, now: float) -> bool:
        """Take a report; whether anything new is posted."""
        self._missing[minibatch] -= 1
        if now > self._latest_s[minibatch]:
            self._latest_s[minibatch] = now
        before = self._posted
        while self._taken < self._minibatches and not self._missing[self._taken]:
            self._now = max(self._now, self._latest_s[self._taken]) + self._caller_s
            self._taken += 1
            if self._posted < self._minibatches:
                self._post()
        return self._posted > before

    def _post(self) -> None:
        for door in self.doors:
            door.extend([self._now] * self._microbatches)
        self._posted += 1


class Simulation:
    """Stations at work, from the first action to the last.

    An action begins when the one before it in its station's order has ended and its inputs have arrived; what it sends
    leaves when it has computed, before any update, and the station goes on. The event is the end of computing: when
    everything it waits for is known, so is when that will be. Time goes on from event to event, so that transfers are
    asked for in the order of time, and need no events of their own.

    Args:
        stations: all stages' replicas, by their numbers.
        caller: feeds the stations of the first stage, and takes reports of minibatches: where ``synchronous``, one of
            each station when it has updated; else one of each station that sends no forward on, when it has computed.
        processors: how many stations work at once; others wait, first come, first served.
    """

    def __init__(self, stations: Sequence[Station], caller: Caller, synchronous: bool, processors: float) -> None:
        self._stations, self._caller, self._synchronous = stations, caller, synchronous
        self._limited, self._idle = processors < len(stations), processors
        self._first = [station for station in stations if station.work.kinds[0][0] == 0]
        for station in self._first:
            door: Arrivals = deque()
            caller.doors.append(door)
            station.inputs[0].append(door)
        self._heap: list[tuple[float, int]] = []
        self._queue: deque[Station] = deque()
        self._wires = sum(len(wires) for station in stations for wires in station.outputs)
        self._worked, self._reduced, self._updated, self._arrived = Journal(2), Journal(), Journal(), Journal()
        starts_s, ends_s = self._worked.seconds
        self._note_number, self._note_start, self._note_end = (
            self._worked.numbers.append,
            starts_s.append,
            ends_s.append,
        )
        self._note_wire, self._note_arrival = self._arrived.numbers.append, self._arrived.seconds[0].append

    def run(self) -> Record:
        """Until all is done; gives what happened. Raises ScheduleError if the stations wait for each other."""
        heap, stations, count, computed = self._heap, self._stations, len(self._stations), self._computed
        self._caller.begin()
        for station in stations:
            self._begin(station)
        while heap:
            now, event = heappop(heap)
            if event < count:
                computed(stations[event], now)
            else:
                kind, number = divmod(event, count)
                self._other(kind, stations[number], now)
        for station in stations:
            if station.position < len(station.order):
                raise ScheduleError(f"Deadlock: stage {station.place[0]} stands at its action {station.position}.")
        start_s, computed_s = self._worked.of_each(count)
        (updated_s,), (reduced_s,) = self._updated.of_each(count), self._reduced.of_each(count)
        (arrived_s,) = self._arrived.of_each(self._wires)
        return Record(start_s, computed_s, updated_s, reduced_s, arrived_s)

    def _begin(self, station: Station) -> None:
        """Begin the station's next action, if the end of all that it waits for is known."""
        position, order = station.position, station.order
        if position == len(order):
            return
        code = order[position]
        slot = station.waits_at[code % station.kinds]
        inputs = station.inputs[slot]
        for arrivals in inputs:
            if not arrivals:
                station.awaits = slot
                return
        start_s = station.free_s
        for arrivals in inputs:
            arrived_s = arrivals.popleft()
            if arrived_s > start_s:
                start_s = arrived_s
        station.awaits = NOTHING
        if self._limited:
            self._push(READY, station, start_s)
            return
        station.start_s = start_s
        taken_s = station.compute_s[code % station.period]
        if station.factors is not None:
            taken_s *= station.factors[position]
        heappush(self._heap, (start_s + taken_s, station.number))

    def _computed(self, station: Station, now: float) -> None:
        """Send what is computed, update after the last backward of a minibatch, go on."""
        position = station.position
        microbatch, kind = divmod(station.order[position], station.kinds)
        self._note_number(station.number)
        self._note_start(station.start_s)
        self._note_end(now)
        for wire in station.outputs[kind]:
            self._note_wire(wire.number)
            self._note_arrival(wire.send(now, microbatch))
            reader = wire.reader
            if reader.awaits == wire.slot:
                self._begin(reader)
        if station.work.updates[position]:
            self._gathered(station, now)
            return
        if station.work.reports[position] and not self._synchronous:
            self._report(station.order[position] // station.period, now)
        if self._limited:
            self._release(now)
        station.free_s = now
        station.position = position + 1
        self._begin(station)

    def _gathered(self, station: Station, now: float) -> None:
        """All gradients of a minibatch are there."""
        if station.reduction is None:
            self._update(station, now)
            return
        if self._limited:
            self._release(now)
        for due_s, number in station.reduction.enter(station.number, now):
            self._push(REDUCED, self._stations[number], due_s)

    def _update(self, station: Station, now: float) -> None:
        taken_s = station.update_s[station.order[station.position] % station.kinds]
        if station.factors is not None:
            taken_s *= station.factors[station.position]
        if self._limited or station.reduction is not None:
            self._push(UPDATED, station, now + taken_s)
        else:
            self._go_on(station, now + taken_s)

    def _go_on(self, station: Station, now: float) -> None:
        self._updated.note(station.number, now)
        station.free_s = now
        if self._synchronous:
            self._report(station.order[station.position] // station.period, now)
        station.position += 1
        self._begin(station)

    def _report(self, minibatch: int, now: float) -> None:
        if self._caller.report(minibatch, now):
            for station in self._first:
                if station.awaits == 0:
                    self._begin(station)

    def _other(self, kind: int, station: Station, now: float) -> None:
        if kind == READY:
            self._ask(station, now)
        elif kind == REDUCED:
            self._reduced.note(station.number, now)
            if self._limited:
                station.updating = True
                self._ask(station, now)
            else:
                self._update(station, now)
        else:
            if self._limited:
                self._release(now)
            if station.reduction is not None:
                for due_s, number in station.reduction.updated(station.number, now):
                    self._push(REDUCED, self._stations[number], due_s)
            self._go_on(station, now)

    def _push(self, kind: int, station: Station, now: float) -> None:
        heappush(self._heap, (now, kind * len(self._stations) + station.number))

    def _ask(self, station: Station, now: float) -> None:
        """Take a processor, or wait for one."""
        if self._idle > 0:
            self._idle -= 1
            self._go(station, now)
        else:
            self._queue.append(station)

    def _release(self, now: float) -> None:
        """Give a processor back, to who has waited longest."""
        if self._queue:
            self._go(self._queue.popleft(), now)
        else:
            self._idle += 1

    def _go(self, station: Station, now: float) -> None:
        if station.updating:
            station.updating = False
            self._update(station, now)
            return
        code, position = station.order[station.position], station.position
        factor = 1.0 if station.factors is None else station.factors[position]
        station.start_s = now
        heappush(self._heap, (now + station.compute_s[code % station.period] * factor, station.number))
