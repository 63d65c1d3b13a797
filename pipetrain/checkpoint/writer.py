"""When a checkpoint is due, and the thread that writes it while training goes on."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from pipetrain.run.control import StoppableThread

SHARE = 0.01  # of training's time that checkpoints on the disk may cost
FIRST_S = 1.0  # until the first one, whose cost nobody knows
REMEMBERED = 3  # the newest checkpoints, whose mean cost counts


class Pace:
    """As often as checkpoints cost a share of the time, each by what the last ones did.

    Where failures come every so often, the interval is Young's, ``sqrt(2 * cost * failures_every_s)``: what is lost by
    a failure and what checkpoints cost are then least together. (Young, 1974; Daly, 2006, has terms of higher order,
    which matter where a checkpoint takes long against the time between failures.)

    Args:
        failures_every_s: the mean time between failures, if it is known.
        now_s: a clock, in seconds.
        share: of the time that checkpoints may cost.
    """

    def __init__(
        self,
        failures_every_s: float | None = None,
        now_s: Callable[[], float] = time.perf_counter,
        share: float = SHARE,
    ) -> None:
        self._failures_every_s, self._now_s, self._share = failures_every_s, now_s, share
        self._costs_s: deque[float] = deque(maxlen=REMEMBERED)
        self._since_s = now_s()

    @property
    def is_due(self) -> bool:
        """Whether it is time."""
        return self._now_s() - self._since_s >= self.interval_s

    @property
    def interval_s(self) -> float:
        """From one checkpoint to the next."""
        if not self._costs_s:
            return FIRST_S
        cost_s = sum(self._costs_s) / len(self._costs_s)
        if self._failures_every_s is not None:
            return math.sqrt(2 * cost_s * self._failures_every_s)
        return cost_s / self._share

    def begun(self) -> None:
        """A checkpoint is made now."""
        self._since_s = self._now_s()

    def ended(self, cost_s: float) -> None:
        """It has cost so much."""
        self._costs_s.append(cost_s)


class Writing(StoppableThread):
    """One checkpoint that is written.

    Args:
        step: of which it is.
        write: makes arrays of what there is, which may have to come from other processes, and writes them; gives
            whether that was to be done.

    ``is_written`` says so, ``error`` is the exception that came of it, ``took_s`` are the seconds that it took, and
    ``busy_s`` those of a processor.
    """

    def __init__(self, step: int, write: Callable[[], bool]) -> None:
        super().__init__(name="pipetrain checkpoint", daemon=True)
        self.step, self._write = step, write
        self.is_written = False
        self.error: Exception | None = None
        self.took_s = self.busy_s = 0.0

    def run(self) -> None:
        """The thread's body."""
        begun_s, busy_s = time.perf_counter(), time.thread_time()
        try:
            self.is_written = self._write()
        except Exception as error:
            self.error = error
        self.took_s, self.busy_s = time.perf_counter() - begun_s, time.thread_time() - busy_s

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.ident is not None and not self.is_alive()
