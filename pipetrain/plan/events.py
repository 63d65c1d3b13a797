"""The simulator's kernel: a heap of timed events, one for each action."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from pipetrain.plan.network import Network, Route
from pipetrain.plan.replay import ScheduleError

# What happens at an event, in the order of (time, kind * stations + station)
COMPUTED, READY, UPDATED, REDUCED = range(4)
NOTHING = -1
Due = list[tuple[float, int]]  # when a station has what it waits for, and which


class Station(NamedTuple):
    """One replica of one stage, at its device.

    Its ``order`` are codes, ``2 * microbatch`` for a forward, one more for a backward; ``compute_s`` what each takes,
    the forward and the backward of every piece of a minibatch in turn; ``factors`` by how much longer each action takes
    than that, if it differs.
    """

    stage: int
    replica: int
    device: int
    order: array[int]
    compute_s: list[float]
    update_s: float
    factors: array[float] | None = None


class Wire:
    """What one station sends another for one kind of action (0: forward, 1: backward): first in, first out."""

    __slots__ = ("_free_at", "_holds_s", "_latency_s", "_media", "_pieces", "arrivals", "kind", "reader")

    def __init__(self, network: Network, route: Route, sizes: Sequence[int | None], reader: int, kind: int) -> None:
        """``sizes`` are the bytes of each piece of a minibatch, None where both stations share none of its rows."""
        self.arrivals = array("d")
        self.reader, self.kind = reader, kind
        self._pieces = len(sizes)
        self._holds_s = [NOTHING if size is None else size / route.bandwidth_bytes_per_s for size in sizes]
        self._latency_s, self._media, self._free_at = route.latency_s, route.media, network.free_at

    def send(self, now: float, microbatch: int) -> None:
        """Begin a transfer as soon as its media are free, see ``Network.send``, which this is in a hurry."""
        hold_s = self._holds_s[microbatch % self._pieces]
        if hold_s == NOTHING:
            self.arrivals.append(now)
            return
        free_at = self._free_at
        for medium in self._media:
            if free_at[medium] > now:
                now = free_at[medium]
        now += hold_s
        for medium in self._media:
            free_at[medium] = now
        self.arrivals.append(now + self._latency_s)


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

    A result is there after so many ``reports`` of its minibatch. Everything posted has arrived.
    """

    def __init__(self, minibatches: int, pieces: int, window: int, caller_s: float, reports: int) -> None:
        self.arrivals = array("d")
        self._pieces, self._caller_s, self._reports, self._minibatches = pieces, caller_s, reports, minibatches
        self._missing = [reports] * minibatches
        self._latest_s = [0.0] * minibatches
        self._taken, self._posted, self._now = 0, 0, 0.0
        for _ in range(min(window, minibatches)):
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
        self.arrivals.extend([self._now] * self._pieces)
        self._posted += 1


class Record:
    """What a station did, in its order: when each action began and had computed, and each minibatch's update ended."""

    __slots__ = ("computed_s", "reduced_s", "start_s", "updated_s")

    def __init__(self) -> None:
        self.start_s, self.computed_s = array("d"), array("d")
        self.updated_s, self.reduced_s = array("d"), array("d")


class Simulation:
    """Stations at work, from the first action to the last: ``run``, then read the ``records``.

    An action begins when the one before it in its station's order has ended and its inputs have arrived; what it sends
    leaves when it has computed, before any update, and the station goes on. The event is the end of computing: when
    everything it waits for is known, so is when that will be. Time goes on from event to event, so that transfers are
    asked for in the order of time, and need no events of their own.

    Args:
        stations: all stages' replicas.
        outputs: for each station the wires of its forwards and of its backwards.
        caller: feeds the stations of the first stage, and takes reports of minibatches: where ``synchronous``, one of
            each station when it has updated; else one of each station that sends no forward on, when it has computed.
        reductions: for each station that has any, how it sums gradients with its stage's other replicas.
        processors: how many stations work at once; others wait, first come, first served.
    """

    def __init__(
        self,
        stations: Sequence[Station],
        outputs: Sequence[tuple[list[Wire], list[Wire]]],
        caller: Caller,
        synchronous: bool,
        reductions: dict[int, Reduction],
        processors: float,
    ) -> None:
        count = len(stations)
        self.records = [Record() for _ in stations]
        self._stations, self._outputs, self._caller = stations, outputs, caller
        self._synchronous, self._reductions = synchronous, reductions
        self._limited, self._idle = processors < count, processors
        self._inputs: list[tuple[list[array[float]], list[array[float]]]] = [([], []) for _ in stations]
        for wires in outputs:
            for wire in (*wires[0], *wires[1]):
                self._inputs[wire.reader][wire.kind].append(wire.arrivals)
        self._first = [n for n, station in enumerate(stations) if station.stage == 0]
        for n in self._first:
            self._inputs[n][0].append(caller.arrivals)
        self._period = len(stations[0].compute_s)
        self._position, self._free_s = [0] * count, [0.0] * count
        self._awaits, self._updating = [NOTHING] * count, [False] * count
        self._heap: list[tuple[float, int]] = []
        self._queue: deque[int] = deque()

    def run(self) -> None:
        """Until all is done. Raises ScheduleError if the stations wait for each other."""
        heap, count, computed = self._heap, len(self._stations), self._computed
        for n in range(count):
            self._begin(n)
        while heap:
            now, event = heappop(heap)
            if event < count:
                computed(event, now)
            else:
                self._other(*divmod(event, count), now)
        for n, station in enumerate(self._stations):
            if self._position[n] < len(station.order):
                raise ScheduleError(f"Deadlock: stage {station.stage} stands at action {self._position[n]} of its own.")

    def _begin(self, n: int) -> None:
        """Begin the station's next action, if the end of all that it waits for is known."""
        position, order = self._position[n], self._stations[n].order
        if position == len(order):
            return
        code = order[position]
        start_s, microbatch = self._free_s[n], code >> 1
        for arrivals in self._inputs[n][code & 1]:
            if len(arrivals) <= microbatch:
                self._awaits[n] = code & 1
                return
            if arrivals[microbatch] > start_s:
                start_s = arrivals[microbatch]
        self._awaits[n] = NOTHING
        if self._limited:
            heappush(self._heap, (start_s, READY * len(self._stations) + n))
        else:
            self._start(n, start_s)

    def _start(self, n: int, now: float) -> None:
        _, _, _, order, compute_s, _, factors = self._stations[n]
        position = self._position[n]
        taken_s = compute_s[order[position] % self._period]
        if factors is not None:
            taken_s *= factors[position]
        self.records[n].start_s.append(now)
        heappush(self._heap, (now + taken_s, n))

    def _computed(self, n: int, now: float) -> None:
        """Send what is computed, update after the last backward of a minibatch, go on."""
        code = self._stations[n].order[self._position[n]]
        self.records[n].computed_s.append(now)
        wires = self._outputs[n][code & 1]
        for wire in wires:
            wire.send(now, code >> 1)
            if self._awaits[wire.reader] == wire.kind:
                self._begin(wire.reader)
        place = code % self._period
        if place == self._period - 1:
            self._gathered(n, now)
            return
        if place == self._period - 2 and not wires and not self._synchronous:
            self._report(code // self._period, now)
        if self._limited:
            self._release(now)
        self._free_s[n] = now
        self._position[n] += 1
        self._begin(n)

    def _gathered(self, n: int, now: float) -> None:
        """All gradients of a minibatch are there."""
        if n in self._reductions:
            if self._limited:
                self._release(now)
            self._push(REDUCED, self._reductions[n].enter(n, now))
        else:
            self._update(n, now)

    def _update(self, n: int, now: float) -> None:
        station = self._stations[n]
        factor = 1.0 if station.factors is None else station.factors[self._position[n]]
        end_s = now + station.update_s * factor
        if self._limited or n in self._reductions:
            heappush(self._heap, (end_s, UPDATED * len(self._stations) + n))
        else:
            self._updated(n, end_s)

    def _updated(self, n: int, now: float) -> None:
        self.records[n].updated_s.append(now)
        code = self._stations[n].order[self._position[n]]
        self._free_s[n] = now
        self._position[n] += 1
        if self._synchronous:
            self._report(code // self._period, now)
        self._begin(n)

    def _report(self, minibatch: int, now: float) -> None:
        if self._caller.report(minibatch, now):
            for n in self._first:
                if self._awaits[n] == 0:
                    self._begin(n)

    def _other(self, kind: int, n: int, now: float) -> None:
        if kind == READY:
            self._ask(n, now)
        elif kind == REDUCED:
            self.records[n].reduced_s.append(now)
            if self._limited:
                self._updating[n] = True
                self._ask(n, now)
            else:
                self._update(n, now)
        else:
            if self._limited:
                self._release(now)
            if n in self._reductions:
                self._push(REDUCED, self._reductions[n].updated(n, now))
            self._updated(n, now)

    def _push(self, kind: int, events: Due) -> None:
        for now, n in events:
            heappush(self._heap, (now, kind * len(self._stations) + n))

    def _ask(self, n: int, now: float) -> None:
        """Take a processor, or wait for one."""
        if self._idle > 0:
            self._idle -= 1
            self._go(n, now)
        else:
            self._queue.append(n)

    def _release(self, now: float) -> None:
        """Give a processor back, to who has waited longest."""
        if self._queue:
            self._go(self._queue.popleft(), now)
        else:
            self._idle += 1

    def _go(self, n: int, now: float) -> None:
        if self._updating[n]:
            self._updating[n] = False
            self._update(n, now)
        else:
            self._start(n, now)
