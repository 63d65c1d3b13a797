"""Which minibatches of a trace show what its stages do most of the time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipetrain.trace.records import ENDING
from pipetrain.trace.trace import Trace

# Of all parts of a trace with as many microbatches, by their seconds, those between these shares of them: of a short
# trace most of the parts may have an evaluation in them.
USUAL = (0.1, 0.3)


def first_of_steady(trace: Trace, count: int) -> int:
    """The first of ``count`` microbatches about the middle of a trace that take as long as most do.

    They are whole minibatches from their first microbatch on, without a drain, and where there are such with as many
    microbatches between them and a drain as there are stages, so that no stage is seen to wait for one. What a few of
    them waited for, such as an evaluation, is not in them.
    """
    number, starts_s, ends_s = _times(trace)
    if not len(number):
        return 0
    firsts = np.flatnonzero(number % pieces(trace) == 0)
    firsts = firsts[firsts + count <= len(number)]
    for margin in (trace.stages, 0):
        apart = _apart(number[firsts], number[-1] + 1, count, margin, np.sort(trace.starts))
        if apart.any():
            return _usual(firsts[apart], number, ends_s[firsts[apart] + count - 1] - starts_s[firsts[apart]])
    return int(number[0])


def pieces(trace: Trace) -> int:
    """How many microbatches a minibatch has: the backwards of as many at one stage lead to an update."""
    spans = trace.spans[np.isin(trace.spans.op, ENDING) & (trace.spans.stage == 0) & (trace.spans.replica == 0)]
    made = np.unique(np.stack([spans.version, spans.microbatch]), axis=1)[0]  # a backward may be several spans
    return int(np.unique(made, return_counts=True)[1].max(initial=1))


def _times(trace: Trace) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.float64]]:
    """Every microbatch, when its first action began, and when its last one ended."""
    number, of = np.unique(trace.spans.microbatch, return_inverse=True)
    starts_s, ends_s = np.full(len(number), np.inf), np.zeros(len(number))
    np.minimum.at(starts_s, of, trace.spans.start_s)
    np.maximum.at(ends_s, of, trace.spans.end_s)
    return number, starts_s, ends_s


def _apart(
    firsts: NDArray[np.int32], end: int, count: int, margin: int, starts: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Of parts that begin with these microbatches, whether they are apart from all drains, and from the end."""
    run = np.searchsorted(starts, firsts, side="right")
    begin = np.concatenate([[0], starts])[run]
    until = np.concatenate([starts, [end]])[run]
    found: NDArray[np.bool_] = (firsts >= begin + margin) & (firsts + count + margin <= until)
    return found


def _usual(firsts: NDArray[np.int64], number: NDArray[np.int32], seconds: NDArray[np.float64]) -> int:
    """Of these parts, the one next to the middle of those that take about as long as most do."""
    least, most = np.quantile(seconds, USUAL)
    usual = firsts[(seconds >= least) & (seconds <= most)]
    if not len(usual):
        usual = firsts[[np.argsort(seconds)[len(seconds) // 2]]]
    return int(number[usual[np.argmin(np.abs(usual - np.median(firsts)))]])
