"""The simulator's kernel: a heap of timed events, one for each action."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from pipetrain.schemes.dry_run import ScheduleError
from pipetrain.simulation.journal import Journal, SimulationRecord
from pipetrain.simulation.stations import NOTHING, Arrivals, SimulatedCaller, Station

# What happens at an event, in the order of (time, kind * stations + station)
COMPUTED, READY, UPDATED, REDUCED = range(4)


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

    def __init__(
        self, stations: Sequence[Station], caller: SimulatedCaller, synchronous: bool, processors: float
    ) -> None:
        self._stations, self._caller, self._synchronous = stations, caller, synchronous
        self._limited, self._idle = processors < len(stations), processors
        self._first = [station for station in stations if station.work.kinds[0][0] == 0]
        for station in self._first:
            arrivals: Arrivals = deque()
            caller.inputs.append(arrivals)
            station.inputs[0].append(arrivals)
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

    def run(self) -> SimulationRecord:
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
                raise ScheduleError(f"Deadlock: {station.where(station.position)}.")
        start_s, computed_s = self._worked.of_each(count)
        (updated_s,), (reduced_s,) = self._updated.of_each(count), self._reduced.of_each(count)
        (arrived_s,) = self._arrived.of_each(self._wires)
        return SimulationRecord(start_s, computed_s, updated_s, reduced_s, arrived_s)

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
