"""A trial: what a minibatch takes a pipeline, of which nothing remains in the model."""

from __future__ import annotations

import time
from itertools import count

import numpy as np

from pipetrain.run.pipeline import Pipeline
from pipetrain.run.window import Minibatch, Window

WARM_UP, WARM_UP_S = 3, 1.0  # minibatches, and seconds, before what is timed: functions are compiled, threads settle
TIMED, TIMED_S = 6, 2.0  # so many minibatches are timed, and more until so many seconds are over;
FEW, MOST_S = 2, 10.0  # fewer, but so many at least, where they take longer than this
WARM_UP_MANY, TIMED_MANY = 100, 200  # minibatches that are enough of each, however little time they take


class TrialClock:
    """Notes when results are there, until that is enough."""

    def __init__(self) -> None:
        self._ends_s: list[float] = []
        self._warm = 0  # how many were there when warming up was over

    def tick(self) -> None:
        """A minibatch is done now."""
        self._ends_s.append(time.perf_counter())
        done = len(self._ends_s)
        is_warm = done >= WARM_UP and self._ends_s[-1] - self._ends_s[0] >= WARM_UP_S
        if not self._warm and (is_warm or done >= WARM_UP_MANY):
            self._warm = done

    @property
    def is_enough(self) -> bool:
        """Whether enough minibatches are timed."""
        timed = len(self._ends_s) - self._warm
        if not self._warm or timed < FEW:
            return False
        taken_s = self._ends_s[-1] - self._ends_s[self._warm - 1]
        return (timed >= TIMED and taken_s >= TIMED_S) or timed >= TIMED_MANY or taken_s >= MOST_S

    @property
    def minibatch_s(self) -> float:
        """Seconds from one minibatch to the next, fitted to all of them: several may come at once."""
        ends_s = self._ends_s[self._warm - 1 :]
        return float(np.polyfit(range(len(ends_s)), ends_s, 1)[0])


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
