"""Simulated time, and devices that do one thing after another in it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

import numpy as np

from pipetrain.schemes.actions import Op

Happens = Callable[[], None]


def varying(slowdown: float, seed: int) -> Callable[[], float]:
    """Gives by how much longer each piece of work takes: random factors, lognormal with mean 1.

    ``slowdown`` is their standard deviation; without it all are 1.
    """
    sigma, rng = math.sqrt(math.log1p(slowdown**2)), np.random.default_rng(seed)
    return lambda: float(rng.lognormal(-(sigma**2) / 2, sigma)) if slowdown else 1.0


class SimulatedClock:
    """What is to happen and when; of what happens at one time, first what was asked for first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Happens]] = []
        self._numbers = count()

    def at(self, time_s: float, happens: Happens) -> None:
        """Let it happen then."""
        heappush(self._heap, (time_s, next(self._numbers), happens))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now, _, happens = heappop(self._heap)
            happens()


class Processors:
    """So many devices work at once; others wait, first come, first served."""

    def __init__(self, number: float = math.inf) -> None:
        self._idle, self._queue = number, deque[Happens]()

    def take(self, then: Happens) -> None:
        """Take a processor, now or when there is one."""
        if self._idle > 0:
            self._idle -= 1
            then()
        else:
            self._queue.append(then)

    def release(self) -> None:
        """Give it back, to who has waited longest."""
        if self._queue:
            self._queue.popleft()()
        else:
            self._idle += 1


class SimulatedSpan:
    """A time in which a device did one operation of a step without a pause."""

    __slots__ = ("end_s", "op", "start_s", "step")

    def __init__(self, op: Op, step: int, start_s: float, end_s: float) -> None:
        self.op, self.step, self.start_s, self.end_s = op, step, start_s, end_s


class SimulatedDevice:
    """Does what it is given, one thing after another; ``spans`` are what it did, with what kept it from that."""

    def __init__(self, clock: SimulatedClock, processors: Processors, factor: Callable[[], float]) -> None:
        self._clock, self._processors, self._factor = clock, processors, factor
        self._queue = deque[tuple[float, Op, int, Callable[[float], None]]]()
        self._busy = False
        self._delay_s = self._free_s = 0.0  # of what it does; when its processor is free of something else
        self.spans: list[SimulatedSpan] = []

    def do(self, seconds: float, op: Op, step: int, then: Callable[[float], None]) -> None:
        """Work for so long, after what it has been given before; ``then`` is told when that began."""
        self._queue.append((seconds, op, step, then))
        if not self._busy:
            self._busy = True
            self._processors.take(self._next)

    def disturb(self, seconds: float) -> None:
        """Its processor is needed for so long for something else: what it does now, or next, ends later."""
        if self._busy:
            self._delay_s += seconds
        else:
            self._free_s = max(self._free_s, self._clock.now) + seconds

    def _next(self) -> None:
        seconds, op, step, then = self._queue.popleft()
        start_s = self._clock.now
        self._delay_s += max(0.0, self._free_s - start_s)
        self._clock.at(start_s + seconds * self._factor(), lambda: self._done(start_s, op, step, then))

    def _done(self, start_s: float, op: Op, step: int, then: Callable[[float], None]) -> None:
        if self._delay_s:
            delay_s, self._delay_s = self._delay_s, 0.0
            self._clock.at(self._clock.now + delay_s, lambda: self._done(start_s, op, step, then))
            return
        end_s, last = self._clock.now, self.spans[-1] if self.spans else None
        if last and (last.op, last.step, last.end_s) == (op, step, start_s):
            last.end_s = end_s
        elif end_s > start_s:
            self.spans.append(SimulatedSpan(op, step, start_s, end_s))
        self._processors.release()
        self._busy = False
        then(start_s)
        if self._queue and not self._busy:
            self._busy = True
            self._processors.take(self._next)
