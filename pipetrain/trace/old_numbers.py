"""Numbers of old files, in which microbatches and versions were counted from the last drain on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipetrain.trace.records import Spans, Transfers


def numbered_through(spans: Spans, sent: Transfers) -> tuple[Spans, Transfers, tuple[int, ...]]:
    """The spans and transfers with numbers that go on after a drain, and the numbers with which the pipeline began."""
    restarts = np.isin(spans.op, ("F", "FI")) & (spans.stage == 0) & (spans.replica == 0) & (spans.microbatch == 0)
    begins_s = np.sort(spans.start_s[restarts])
    run = np.searchsorted(begins_s, spans.start_s, side="right")
    run_of_sent = np.searchsorted(begins_s, sent.start_s, side="right")
    first, made = (_before(run, each, 1 + len(begins_s)) for each in (spans.microbatch, spans.version))
    spans = replace(spans, microbatch=spans.microbatch + first[run], version=spans.version + made[run])
    sent = replace(sent, microbatch=sent.microbatch + first[run_of_sent])
    return spans, sent, tuple(first[1:].tolist())


def _before(run: NDArray[np.int64], number: NDArray[np.int32], runs: int) -> NDArray[np.int32]:
    """For each run, how many there were in all runs before it, if numbers are without gaps."""
    counts: NDArray[Any] = np.zeros(runs, dtype=np.int32)
    np.maximum.at(counts, run, number + 1)
    return np.concatenate([[0], np.cumsum(counts[:-1])]).astype(np.int32)
