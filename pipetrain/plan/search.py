"""The dynamic programme that cuts a chain of blocks into stages and gives each its devices.

PipeDream's (arXiv 1806.03377, section 3.3), from the end of the chain: the best way to place blocks i.. on
devices a.. is a first stage of blocks i to j-1 on r devices, and the best way to place what is left:

``T(i, a) = min over j, r, b of max(cost(i, j, r, a), T(j, b))``, the next stage's first device b being a+r or the
first of the next group of devices (the next host's).

It is solved by asking what can be done within a time t. Costs being ``f[j] - g[i]``, this takes one running
minimum of f per place; where blocks share weights, the seconds of every stage are looked at. A no brings the lower
bound up to the least cost that was refused, a yes brings the upper one down to the slowest stage of what was found,
until the two meet: the optimum, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipetrain.plan.cost import Affine, Floats, Memory, Place

CLOSE = 1 + 1e-9  # seconds nearer to each other are equal: a byte more to send, or sums in another order
HUGE = 1e300  # seconds


class StageChoice(NamedTuple):
    """A stage: where its blocks begin and end, and where it is."""

    first: int
    end: int
    place: Place


class Problem(NamedTuple):
    """A chain of ``blocks`` to be placed on ``devices``.

    ``places[a]`` are the places of stages that start on device a, ``seconds`` what any stage takes there. ``stages`` is
    their number where it is given; no device may then be left out.
    """

    blocks: int
    devices: int
    places: list[list[Place]]
    seconds: dict[Place, Affine]
    stages: int | None

    def slowest_s(self, choices: Sequence[StageChoice]) -> float:
        """Seconds of the slowest of these stages."""
        return max(self.seconds[place].of(first, end) for first, end, place in choices)


class Limit(NamedTuple):
    """What a device may hold: ``memory(place, n)`` is what it keeps of a stage from which n lead to the end.

    ``stages`` is how many there are, None where that is open.
    """

    memory: Callable[[Place, int], Memory]
    limit_bytes: float
    stages: int | None = None


def fastest(
    problem: Problem, limit: Limit | None = None, at_least: float = 0.0, below: float = HUGE
) -> list[StageChoice] | None:
    """The stages of which the slowest takes least time; None if nothing keeps to the limit and stays below ``below``.

    ``at_least`` is a time that is known to be needed.
    """
    low, high, best = at_least, below * (1 - 1e-9), None
    while low < high:
        within = high if best is None else low if high <= low * (1 + 1e-9) else (low + high) / 2
        reach = Reach(problem, within, limit)
        found = reach.stages()
        if found is None:
            if best is None:
                return None
            low = max(reach.least_refused, within)
        else:
            best, high = found, problem.slowest_s(found)
            if within == low:
                break
    return best


def most_even(problem: Problem, within: float) -> list[StageChoice]:
    """Of the ways in which no stage takes longer than this, the one with the least sum of squared seconds."""
    reach, ahead = Reach(problem, within), _reached(problem, within)
    best = np.full((problem.devices + 1, problem.blocks + 1), np.inf)
    best[reach.can[0, :, -1], -1] = 0.0
    choices = np.zeros((problem.devices, problem.blocks + 1, 2), dtype=np.int64)
    for device in range(problem.devices - 1, -1, -1):
        starts = np.flatnonzero(ahead[device] & reach.can[0, device])
        starts = starts[starts < problem.blocks]
        for index, place in enumerate(problem.places[device]):
            ends = np.flatnonzero(np.isfinite(best[place.after]))
            if not len(starts) or not len(ends):
                continue
            cost = problem.seconds[place].of_all(starts, ends)
            refused = (cost > within * CLOSE) | (ends[None, :] <= starts[:, None])
            cost *= cost
            cost += best[place.after][ends]
            cost[refused] = np.inf
            at = cost.argmin(axis=1)
            value = cost[np.arange(len(starts)), at]
            better = value < best[device][starts]
            best[device][starts[better]] = value[better]
            choices[device][starts[better]] = np.stack([np.full(len(at), index), ends[at]], axis=1)[better]
    found, i, device = [], 0, 0
    while i < problem.blocks:
        index, end = (int(x) for x in choices[device][i])
        found.append(StageChoice(i, end, problem.places[device][index]))
        i, device = end, found[-1].place.after
    return found


def _reached(problem: Problem, within: float) -> NDArray[np.bool_]:
    """Whether the blocks before i fit on the devices before a: shape (devices + 1, blocks + 1)."""
    reached = np.zeros((problem.devices + 1, problem.blocks + 1), dtype=bool)
    reached[0, 0] = True
    for device in range(problem.devices):
        for place in problem.places[device]:
            seconds = problem.seconds[place]
            if seconds.beside is None:
                latest = np.maximum.accumulate(np.where(reached[device], seconds.to_start, -np.inf))
                reached[place.after][1:] |= (seconds.to_end[1:] - latest[:-1]) <= within * CLOSE
                continue
            starts, ends = np.flatnonzero(reached[device]), np.arange(problem.blocks + 1)
            possible = seconds.of_all(starts, ends) <= within * CLOSE
            reached[place.after] |= (possible & (ends[None, :] > starts[:, None])).any(axis=0)
    return reached


class Reach:
    """What can be done if no stage takes longer than ``within`` seconds.

    ``can[n, a, i]`` says whether n stages can place blocks i.. on devices a..; without a limit n is 0 and stands for
    any number, since what a stage takes does not depend on it. ``least_refused``: the least seconds of any stage that
    was too slow; for any time below it the answers are the same.
    """

    def __init__(self, problem: Problem, within: float, limit: Limit | None = None) -> None:
        self._problem, self._within, self._limit = problem, within * CLOSE, limit
        self.least_refused = HUGE
        most = 0 if limit is None else limit.stages or min(problem.devices, problem.blocks)
        self.can = np.zeros((most + 1, problem.devices + 1, problem.blocks + 1), dtype=bool)
        self.can[0, problem.devices if problem.stages else slice(None), -1] = True
        for device in range(problem.devices - 1, -1, -1):
            for place in problem.places[device]:
                self._extend(device, place)

    def stages(self) -> list[StageChoice] | None:
        """Stages that place the whole chain, the fewest where their number is open; None if none do."""
        given = self._limit.stages if self._limit else None
        counts = range(len(self.can)) if given is None else [given]
        left = next((count for count in counts if self.can[count, 0, 0]), None)
        if left is None:
            return None
        i, device, found = 0, 0, []
        while i < self._problem.blocks:
            end, place = next(self._next(i, device, left))
            found.append(StageChoice(i, end, place))
            i, device, left = end, place.after, max(left - 1, 0)
        return found

    def _extend(self, device: int, place: Place) -> None:
        """Put a stage at this place before what is placed already."""
        for left in range(0 if self._limit is None else 1, len(self.can)):
            ends = self._behind(place, left)
            if not ends.any():
                continue
            taken = self._soonest(place, ends, left)
            possible = taken <= self._within
            self.least_refused = min(self.least_refused, float(taken.min(where=~possible, initial=HUGE)))
            self.can[left, device, :-1] |= possible

    def _behind(self, place: Place, left: int) -> NDArray[np.bool_]:
        """Where a stage at this place may end, from which ``left`` stages lead to the end: shape (blocks + 1,)."""
        behind: NDArray[np.bool_] = self.can[max(left - 1, 0), place.after]
        return behind

    def _soonest(self, place: Place, ends: NDArray[np.bool_], left: int) -> Floats:
        """The least seconds over the ends j > i that are possible, for every i below the last; infinite if none is."""
        seconds, every = self._problem.seconds[place], np.arange(self._problem.blocks + 1)
        if seconds.beside is not None:
            possible = ends[None, :] & (every[None, :] > every[:-1, None])
            if self._limit is not None:
                possible &= self._limit.memory(place, left).fits(self._limit.limit_bytes)
            soonest: Floats = np.where(possible, seconds.of_all(every[:-1], every), np.inf).min(axis=1)
            return soonest
        f = np.where(ends, seconds.to_end, np.inf)
        if self._limit is None:
            return np.minimum.accumulate(f[::-1])[::-1][1:] - seconds.to_start[:-1]
        last = self._limit.memory(place, left).ends(self._limit.limit_bytes)
        return _window_minima(f, np.arange(1, len(f)), last + 1) - seconds.to_start[:-1]

    def _next(self, i: int, device: int, left: int) -> Iterator[tuple[int, Place]]:
        for place in self._problem.places[device]:
            seconds, every = self._problem.seconds[place], np.arange(self._problem.blocks + 1)
            fits = self._behind(place, left) & (seconds.of_all(np.array([i]), every)[0] <= self._within)
            fits[: i + 1] = False
            if self._limit is not None and seconds.beside is not None:
                fits &= self._limit.memory(place, left).fits(self._limit.limit_bytes)[i]
            elif self._limit is not None:
                fits[self._limit.memory(place, left).ends(self._limit.limit_bytes)[i] + 1 :] = False
            yield from ((int(end), place) for end in np.flatnonzero(fits))


def _window_minima(values: Floats, first: NDArray[np.int64], end: NDArray[np.int64]) -> Floats:
    """``min(values[first:end])`` for many windows at once, by minima over powers of two; infinite where empty."""
    length = np.maximum(end - first, 0)
    result = np.full(len(first), np.inf)
    minima, size = values, 1
    while size <= max(int(length.max(initial=0)), 1):
        now = (length >= size) & (length < 2 * size)
        result[now] = np.minimum(minima[first[now]], minima[end[now] - size])
        if len(minima) <= size:
            break
        minima, size = np.minimum(minima[:-size], minima[size:]), 2 * size
    return result
