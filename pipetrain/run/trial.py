"""A trial: what a minibatch takes a pipeline, of which nothing remains in the model."""

from __future__ import annotations

import time
from itertools import count

import numpy as np

from pipetrain.run.pipeline import Pipeline
from pipetrain.run.window import Minibatch, Window

WARM_UP = 3  # minibatches before those that are timed: functions are compiled, and gradients wait from one to the next
LEAST = 6  # minibatches that are timed,
LEAST_S = 0.5  # and more until so many seconds are over,
MOST = 100  # or so many are done


def minibatch_s(pipeline: Pipeline, minibatch: Minibatch) -> float:
    """Median seconds from one result to the next while the pipeline trains on this minibatch again and again.

    The pipeline is drained before and after; the model keeps its weights and state. What optimizers have gathered is
    not kept. Raises what a stage raises.
    """
    again = (minibatch._replace(x=list(minibatch.x)) for _ in count())  # rows sent ahead are known by their list
    ends_s: list[float] = []
    try:
        window = Window(pipeline, again, None)
        while not _is_enough(ends_s):
            _, result = window.step()
            np.asarray(result.loss)  # which is there when the minibatch is done
            ends_s.append(time.perf_counter())
    finally:
        pipeline.abort(store=False)
    return float(np.median(np.diff(ends_s[WARM_UP - 1 :])))


def _is_enough(ends_s: list[float]) -> bool:
    timed = len(ends_s) - WARM_UP
    return timed >= MOST or (timed >= LEAST and ends_s[-1] - ends_s[WARM_UP - 1] >= LEAST_S)
