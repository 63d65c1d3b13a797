"""Keeps the pipeline full: posts minibatches ahead of the step that Keras' loop is at, or of a trial."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from pipetrain.run.collector import Result
from pipetrain.run.pipeline import Pipeline


class Minibatch(NamedTuple):
    """Inputs, labels and sample weights of one step, and the learning rate it takes along, if it does."""

    x: list[Any]
    y: Any
    sample_weight: Any
    learning_rate: float | None = None


def never(updates: int) -> bool:
    """For ``Window``: no update needs a drain."""
    return False


class Window:
    """Each ``step`` returns one minibatch with its result, in order, and has posted a window of later ones.

    The logs of a step are therefore those of its own minibatch, whatever is in flight. ``steps`` bounds what is read of
    ``minibatches``: Keras may go on reading from the same iterator in the next epoch.

    If ``drains_after(n)`` is true for the number n of updates after all minibatches posted so far, nothing more is
    posted until every result is taken: the weights are then those of exactly n updates. ``updates`` are those made
    before.

    A pipeline that ``sends_ahead`` is given each minibatch one before its turn, to send it; an error in reading it is
    raised at its own turn.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        minibatches: Iterator[Minibatch],
        steps: int | None,
        drains_after: Callable[[int], bool] = never,
        updates: int = 0,
    ) -> None:
        self._pipeline, self._minibatches = pipeline, minibatches
        self._left, self._drains_after, self._updates = steps, drains_after, updates
        self._posted: deque[Minibatch] = deque()
        self._following: list[Minibatch | Exception | None] = []  # the next one, if it has been read

    @property
    def in_flight(self) -> int:
        """How many minibatches are posted whose results no step has taken."""
        return len(self._posted)

    def step(self) -> tuple[Minibatch, Result]:
        """The next minibatch and its result. Raises StopIteration when the data have ended."""
        while len(self._posted) < self._pipeline.window and self._left != 0:
            if self._posted and self._drains_after(self._updates):
                break
            minibatch = self._read()
            if minibatch is None:
                self._left = 0
                break
            self._left = None if self._left is None else self._left - 1
            self._send_ahead()
            self._pipeline.post(*minibatch)
            self._posted.append(minibatch)
            self._updates += 1
        if not self._posted:
            raise StopIteration
        return self._posted.popleft(), self._pipeline.result()

    def _read(self) -> Minibatch | None:
        """The next minibatch; None when the data have ended."""
        following = self._following.pop() if self._following else next(self._minibatches, None)
        if isinstance(following, Exception):
            raise following
        return following

    def _send_ahead(self) -> None:
        if not self._pipeline.sends_ahead or self._left == 0:
            return
        try:
            following = next(self._minibatches, None)
            if following is not None:
                self._pipeline.send_ahead(following.x, following.y, following.sample_weight)
            self._following.append(following)
        except Exception as error:
            self._following.append(error)

    def remaining(self) -> Iterator[tuple[Minibatch, Result]]:
        """The results of minibatches posted ahead and not yet returned; no more minibatches are read."""
        self._left = 0
        while self._posted:
            yield self._posted.popleft(), self._pipeline.result()


WARM_UP, WARM_UP_S = 3, 1.0  # minibatches, and seconds, before what is timed: functions are compiled, threads settle
TIMED, TIMED_S = 6, 2.0  # so many minibatches are timed, and more until so many seconds are over;
FEW, MOST_S = 2, 10.0  # fewer, but so many at least, where they take longer than this
WARM_UP_MANY, TIMED_MANY = 100, 200  # minibatches that are enough of each, however little time they take


class TrialClock:
    """Notes when results are there, until that is enough.

    ``period``: minibatches after which steps repeat; whole periods are timed, after one at least.
    """

    def __init__(self, period: int = 1) -> None:
        self._period = period
        self._ends_s: list[float] = []
        self._warm = 0  # how many were there when warming up was over

    def tick(self) -> None:
        """A minibatch is done now."""
        self._ends_s.append(time.perf_counter())
        done = len(self._ends_s)
        is_warm = done >= WARM_UP and self._ends_s[-1] - self._ends_s[0] >= WARM_UP_S
        if not self._warm and (is_warm or done >= WARM_UP_MANY) and done >= self._period:
            self._warm = done

    @property
    def is_enough(self) -> bool:
        """Whether enough minibatches are timed."""
        timed = len(self._ends_s) - self._warm
        if not self._warm or timed < FEW or timed % self._period:
            return False
        taken_s = self._ends_s[-1] - self._ends_s[self._warm - 1]
        return (timed >= TIMED and taken_s >= TIMED_S) or timed >= TIMED_MANY or taken_s >= MOST_S

    @property
    def minibatch_s(self) -> float:
        """Seconds from one minibatch to the next, fitted to all periods: several results may come at once."""
        ends_s = self._ends_s[self._warm - 1 :: self._period]
        return float(np.polyfit(range(len(ends_s)), ends_s, 1)[0]) / self._period


def minibatch_s(pipeline: Pipeline, minibatch: Minibatch) -> float:
    """Seconds from one result to the next while the pipeline trains on this minibatch again and again.

    The pipeline is drained before. It makes real updates, which in the end it drops: the model keeps its weights and
    state, but what optimizers have gathered is that of the trial. Raises what a stage raises.
    """
    again = (minibatch._replace(x=list(minibatch.x)) for _ in count())  # rows sent ahead are known by their list
    clock = TrialClock()
    try:
        window = Window(pipeline, again, None)
        while not clock.is_enough:
            _, result = window.step()
            np.asarray(result.loss)  # which is there when the minibatch is done
            clock.tick()
    finally:
        pipeline.abort(store=False)
    return clock.minibatch_s
