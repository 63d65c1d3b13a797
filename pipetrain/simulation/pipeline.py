"""Pipelines on the kernel: the stations' actions in the order of time, an event for each.

Where many stages share nothing, arrays give the same sooner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from heapq import heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipetrain.plan.cluster import Cluster
from pipetrain.schemes.dry_run import ScheduleError
from pipetrain.simulation.kernel import Happens, Journal, Processors, Seconds, SimulatedClock, SimulationRecord
from pipetrain.simulation.stations import NOTHING, Arrivals, Due, SimulatedCaller, Station

# What happens at one time, in this order after the ends of actions, and of each in the order of the stations: they are
# ready for an action, have updated, have the sums of gradients
READY, UPDATED, REDUCED = range(1, 4)
AT_ONCE = 30  # stations that have something to do, on average, from which on arrays are faster than a heap
Numbers = NDArray[Any]


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
        processors: that their devices work on.
    """

    def __init__(
        self, stations: Sequence[Station], caller: SimulatedCaller, synchronous: bool, processors: Processors
    ) -> None:
        self._stations, self._caller, self._synchronous = stations, caller, synchronous
        self._clock, self._processors, self._limited = SimulatedClock(), processors, not processors.are_enough
        self._heap = self._clock.heap
        self._first = [station for station in stations if station.work.kinds[0][0] == 0]
        for station in self._first:
            arrivals: Arrivals = deque()
            caller.inputs.append(arrivals)
            station.inputs[0].append(arrivals)
        for station in stations:
            begins = partial(processors.take, station.device, partial(self._compute, station))
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
            self._processors.release(station.device)
        station.free_s = now
        station.position = position + 1
        self._begin(station)

    def _gathered(self, station: Station, now: float) -> None:
        """All gradients of a minibatch are there."""
        if station.reduction is None:
            self._update(station)
            return
        if self._limited:
            self._processors.release(station.device)
        self._reduce(station.reduction.enter(station.number, now))

    def _reduce(self, due: Due) -> None:
        """The sums of gradients will be there."""
        for due_s, number in due:
            station = self._stations[number]
            self._push(REDUCED, station, due_s, partial(self._reduced, station))

    def _reduced(self, station: Station) -> None:
        self._sums.note(station.number, self._clock.now)
        if self._limited:
            self._processors.take(station.device, partial(self._update, station))
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
            self._processors.release(station.device)
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


def suits(stations: Sequence[Station], cluster: Cluster, processors: Processors, group: int) -> bool:
    """Whether it is right and worth it, for a pipeline that empties after every ``group`` of microbatches.

    The stations are those of a builder that is ``plain``.
    """
    count = len(stations)
    alone = stations[-1].place[0] == count - 1 and processors.are_enough
    own = all(level.contention == "none" for level in cluster.levels)
    return alone and own and group * count >= AT_ONCE * (group + count)


class ArrivalRow:
    """When the caller's minibatches arrive: a row of times, filled from the left."""

    def __init__(self, row: Seconds) -> None:
        self._row, self._filled = row, 0

    def extend(self, arrived_s: Iterable[float]) -> None:
        """These arrive too."""
        times = list(arrived_s)
        self._row[self._filled : self._filled + len(times)] = times
        self._filled += len(times)


class VectorizedSimulation:
    """Stages of one station each, which share neither links nor processors.

    When things happen then does not depend on the order in which they are found out. So all stations whose next action
    has its inputs do it together, as arrays, again and again: each time a step from causes to effects, not of time.

    Args:
        stations: in the order of their stages.
        caller: see ``PipelineSimulation``.
        synchronous: likewise.
    """

    def __init__(self, stations: Sequence[Station], caller: SimulatedCaller, synchronous: bool) -> None:
        self._stations, self._caller, self._synchronous = stations, caller, synchronous
        self._codes = np.array([np.frombuffer(station.order, dtype=np.int32) for station in stations])
        self._compute_s = np.array([station.compute_s for station in stations])
        self._update_s = np.array([station.update_s[1] for station in stations])
        factors = [np.frombuffer(station.factors) for station in stations if station.factors is not None]
        self._factors = np.array(factors) if factors else None
        count, length = self._codes.shape
        self._period = self._compute_s.shape[1]
        self._start_s, self._computed_s = np.zeros((count, length)), np.zeros((count, length))
        # By kind of action, stage (with one more at either end) and microbatch; infinite until it is known.
        self._arrived_s = np.full((2, count + 2, length // 2), np.inf)
        self._arrived_s[1, count] = 0.0  # backwards of the last stage wait for nothing
        self._holds_s, self._latency_s = np.zeros((2 * count, self._period // 2)), np.zeros(2 * count)
        for k, station in enumerate(stations):
            for wire in (*station.outputs[0], *station.outputs[1]):
                self._holds_s[wire.slot * count + k] = wire.holds_s
                self._latency_s[wire.slot * count + k] = wire.latency_s
        caller.inputs.append(ArrivalRow(self._arrived_s[0, 1]))

    def run(self) -> SimulationRecord:
        """Until all is done. Raises ScheduleError if the stations wait for each other."""
        self._caller.begin()
        count, length = self._codes.shape
        position, first = np.zeros(count, dtype=np.int64), np.arange(count) * length
        self._free_s, self._link_free_s = np.zeros(count), np.zeros(2 * count)
        codes, arrived_s = self._codes.reshape(-1), self._arrived_s.reshape(-1)
        working = np.arange(count)
        while len(working):
            at = (first + position)[working]
            code = codes[at]
            came_s = arrived_s[self._slot(code & 1, working, code >> 1)]
            ready = came_s < np.inf
            done = working[ready]
            if not len(done):
                k = working[0]
                raise ScheduleError(f"Deadlock: {self._stations[k].where(int(position[k]))}.")
            self._act(done, at[ready], code[ready], came_s[ready])
            position[done] += 1
            working = np.flatnonzero(position < length)
        return self._record()

    def _slot(self, kind: Numbers, station: Numbers, microbatch: Numbers) -> Numbers:
        """Where the arrival of a microbatch at a station is."""
        _, rows, microbatches = self._arrived_s.shape
        slot: Numbers = (kind * rows + station + 1) * microbatches + microbatch
        return slot

    def _act(self, stations: Numbers, at: Numbers, code: Numbers, came_s: Seconds) -> None:
        """An action of each of these stations; ``at`` is its place in the tables of all."""
        kind, place = code & 1, code % self._period
        factor = 1.0 if self._factors is None else self._factors.reshape(-1)[at]
        start_s = np.maximum(self._free_s[stations], came_s)
        computed_s = start_s + self._compute_s[stations, place] * factor
        self._start_s.reshape(-1)[at], self._computed_s.reshape(-1)[at] = start_s, computed_s
        link = kind * len(self._stations) + stations
        sent_s = np.maximum(computed_s, self._link_free_s[link]) + self._holds_s[link, place >> 1]
        self._link_free_s[link] = sent_s
        reader = stations + 1 - 2 * kind
        self._arrived_s.reshape(-1)[self._slot(kind, reader, code >> 1)] = sent_s + self._latency_s[link]
        updates = place == self._period - 1
        end_s = np.where(updates, computed_s + self._update_s[stations] * factor, computed_s)
        self._free_s[stations] = end_s
        if self._synchronous:
            for n in np.flatnonzero(updates).tolist():
                self._caller.report(int(code[n]) // self._period, float(end_s[n]))
        elif stations[-1] == len(self._stations) - 1 and place[-1] == self._period - 2:
            self._caller.report(int(code[-1]) // self._period, float(computed_s[-1]))

    def _record(self) -> SimulationRecord:
        updates = self._codes % self._period == self._period - 1
        factors = [1.0] * len(self._stations) if self._factors is None else self._factors
        updated_s = [
            computed_s[mine] + update_s * (factor[mine] if isinstance(factor, np.ndarray) else factor)
            for computed_s, mine, update_s, factor in zip(
                self._computed_s, updates, self._update_s, factors, strict=True
            )
        ]
        arrived_s = {
            wire.number: self._arrived_s[wire.slot, k + 2 - 2 * wire.slot]
            for k, station in enumerate(self._stations)
            for wire in (*station.outputs[0], *station.outputs[1])
        }
        in_order = [arrived_s[number] for number in range(len(arrived_s))]
        return SimulationRecord([*self._start_s], [*self._computed_s], updated_s, [], in_order)
