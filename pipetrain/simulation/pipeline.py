"""Pipelines on the kernel: the stations' actions in the order of time, an event for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from heapq import heappush

from pipetrain.schemes.dry_run import ScheduleError
from pipetrain.simulation.kernel import Happens, Journal, Processors, SimulatedClock, SimulationRecord
from pipetrain.simulation.stations import NOTHING, Arrivals, Due, SimulatedCaller, Station

# What happens at one time, in this order after the ends of actions, and of each in the order of the stations: they are
# ready for an action, have updated, have the sums of gradients
READY, UPDATED, REDUCED = range(1, 4)


class PipelineSimulation:
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
        self._clock, self._processors = SimulatedClock(), Processors(processors)
        self._limited, self._heap = processors < len(stations), self._clock.heap
        self._first = [station for station in stations if station.work.kinds[0][0] == 0]
        for station in self._first:
            arrivals: Arrivals = deque()
            caller.inputs.append(arrivals)
            station.inputs[0].append(arrivals)
        for station in stations:
            begins = partial(self._processors.take, partial(self._compute, station))
            station.prepare(begins, partial(self._computed, station))
        self._wires = sum(len(wires) for station in stations for wires in station.outputs)
        self._worked, self._sums, self._updates, self._arrived = Journal(2), Journal(), Journal(), Journal()
        starts_s, ends_s = self._worked.seconds
        self._note_number, self._note_start, self._note_end = (
            self._worked.numbers.append,
            starts_s.append,
            ends_s.append,
        )
        self._note_wire, self._note_arrival = self._arrived.numbers.append, self._arrived.seconds[0].append

    def run(self) -> SimulationRecord:
        """Until all is done; gives what happened. Raises ScheduleError if the stations wait for each other."""
        stations, count = self._stations, len(self._stations)
        self._caller.begin()
        for station in stations:
            self._begin(station)
        self._clock.run()
        for station in stations:
            if station.position < len(station.order):
                raise ScheduleError(f"Deadlock: {station.where(station.position)}.")
        start_s, computed_s = self._worked.of_each(count)
        (updated_s,), (reduced_s,) = self._updates.of_each(count), self._sums.of_each(count)
        (arrived_s,) = self._arrived.of_each(self._wires)
        return SimulationRecord(start_s, computed_s, updated_s, reduced_s, arrived_s)

    def _begin(self, station: Station) -> None:
        """Begin the station's next action, if the end of all that it waits for is known."""
        position = station.position
        if position == station.length:
            return
        slot = station.slots[position]
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
            self._push(READY, station, start_s, station.begins)
            return
        station.start_s = start_s
        heappush(self._heap, (start_s + station.seconds[position], station.number, station.ends))

    def _compute(self, station: Station) -> None:
        """Begin the action on the processor that the station now has."""
        station.start_s = now = self._clock.now
        heappush(self._heap, (now + station.seconds[station.position], station.number, station.ends))

    def _computed(self, station: Station) -> None:
        """Send what is computed, update after the last backward of a minibatch, go on."""
        now, position = self._clock.now, station.position
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
        if station.updates[position]:
            self._gathered(station, now)
            return
        if station.reports[position] and not self._synchronous:
            self._report(station.order[position] // station.period, now)
        if self._limited:
            self._processors.release()
        station.free_s = now
        station.position = position + 1
        self._begin(station)

    def _gathered(self, station: Station, now: float) -> None:
        """All gradients of a minibatch are there."""
        if station.reduction is None:
            self._update(station)
            return
        if self._limited:
            self._processors.release()
        self._reduce(station.reduction.enter(station.number, now))

    def _reduce(self, due: Due) -> None:
        """The sums of gradients will be there."""
        for due_s, number in due:
            station = self._stations[number]
            self._push(REDUCED, station, due_s, partial(self._reduced, station))

    def _reduced(self, station: Station) -> None:
        self._sums.note(station.number, self._clock.now)
        if self._limited:
            self._processors.take(partial(self._update, station))
        else:
            self._update(station)

    def _update(self, station: Station) -> None:
        taken_s = station.update_s[station.order[station.position] % station.kinds]
        if station.factors is not None:
            taken_s *= station.factors[station.position]
        end_s = self._clock.now + taken_s
        if self._limited or station.reduction is not None:
            self._push(UPDATED, station, end_s, partial(self._updated, station))
        else:
            self._go_on(station, end_s)

    def _updated(self, station: Station) -> None:
        if self._limited:
            self._processors.release()
        if station.reduction is not None:
            self._reduce(station.reduction.updated(station.number, self._clock.now))
        self._go_on(station, self._clock.now)

    def _go_on(self, station: Station, now: float) -> None:
        self._updates.note(station.number, now)
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

    def _push(self, kind: int, station: Station, time_s: float, happens: Happens) -> None:
        heappush(self._heap, (time_s, kind * len(self._stations) + station.number, happens))
