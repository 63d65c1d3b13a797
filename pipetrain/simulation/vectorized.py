"""Simulating many stages at once: what ``pipeline`` gives, sooner, where nothing is shared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipetrain.plan.cluster import Cluster
from pipetrain.schemes.dry_run import ScheduleError
from pipetrain.simulation.kernel import Seconds, SimulationRecord
from pipetrain.simulation.stations import SimulatedCaller, Station

AT_ONCE = 30  # stations that have something to do, on average, from which on arrays are faster than a heap
Numbers = NDArray[Any]


def suits(stations: Sequence[Station], cluster: Cluster, group: int) -> bool:
    """Whether it is right and worth it, for a pipeline that empties after every ``group`` of microbatches.

    The stations are those of a builder that is ``plain``.
    """
    count = len(stations)
    alone = stations[-1].place[0] == count - 1 and cluster.processors >= count
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
