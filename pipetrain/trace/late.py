"""Which workers of a tree were late, by a trace of a run, measured or simulated."""

from __future__ import annotations

import math
from typing import Any

from pipetrain.trace.trace import Trace


def late_steps(trace: Trace, workers: int) -> list[int]:
    """For every worker of ``coded-reduce`` the steps to which it could not contribute.

    Those that it did not begin, and those whose gradients were not ready when the root, replica 0 of the trace, updated
    the weights. Unlike ``PipelineModel.stragglers``, these have workers that waited for a parent that was late.
    """
    root = trace.spans[(trace.spans.replica == 0) & (trace.spans.op == "B")]
    updated: dict[Any, float] = dict(zip(root.microbatch.tolist(), root.start_s.tolist(), strict=True))
    mine = trace.spans[trace.spans.op == "FB"]
    in_time = [0] * (workers + 1)
    for step, replica, end_s in zip(mine.microbatch.tolist(), mine.replica.tolist(), mine.end_s.tolist(), strict=True):
        in_time[replica] += end_s <= updated.get(step, -math.inf)
    return [len(updated) - count for count in in_time[1:]]
