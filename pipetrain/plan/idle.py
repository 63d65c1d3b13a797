"""Why stages waited: the idle seconds of a trace by their cause."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipetrain.plan.trace import Seconds, Spans, Trace, Transfers

Keys = NDArray[np.int64]


class Idle(NamedTuple):
    """The seconds in which one replica of a stage did not compute.

    ``transfer_s``: all that it waited for was computed, and on its way. ``imbalance_s``: it was not yet computed; or a
    processor, or the next minibatch, was. ``fill_s``: before its first action and after its last one.
    """

    transfer_s: float
    imbalance_s: float
    fill_s: float

    @property
    def total_s(self) -> float:
        """The seconds of all causes; the rest of the trace's duration the replica computed."""
        return sum(self)


def idle(trace: Trace) -> dict[tuple[int, int], Idle]:
    """For every stage and replica of the trace, the seconds in which it was idle, by cause.

    What replicas wait for each other's gradients, within the span of a backward, is idle too: ``imbalance`` until the
    last one has computed its own, ``transfer`` from then on. Of a trace that knows of no transfers, no idle is theirs.
    """
    places = trace.rows
    row_of = _rows_of(places)
    spans = trace.spans
    row = row_of(spans.stage, spans.replica)
    order = np.lexsort((spans.start_s, row))
    spans, row = spans[order], row[order]
    first = np.diff(row, prepend=-1) != 0
    last = np.diff(row, append=len(places)) != 0
    begin_s = np.where(first, spans.start_s, np.concatenate([[0.0], spans.end_s[:-1]]))
    sent_s, arrived_s = _inputs(spans, row, trace.transfers, row_of)
    under_way_s = np.maximum(np.minimum(arrived_s, spans.start_s) - np.maximum(sent_s, begin_s), 0.0)
    waited_s = np.maximum(spans.start_s - begin_s, 0.0)

    def each(rows: Keys, seconds: Seconds) -> Seconds:
        return np.bincount(rows, seconds, len(places)).astype(np.float64)

    fill_s = each(row[first], spans.start_s[first]) + each(row[last], trace.duration_s - spans.end_s[last])
    reduced, for_others_s, for_sums_s = _reductions(trace.transfers, row_of)
    transfer_s = each(row, under_way_s) + each(reduced, for_sums_s)
    imbalance_s = each(row, waited_s - under_way_s) + each(reduced, for_others_s)
    figures = zip(transfer_s.tolist(), imbalance_s.tolist(), fill_s.tolist(), strict=True)
    return {place: Idle(*seconds) for place, seconds in zip(places, figures, strict=True)}


def _inputs(spans: Spans, row: Keys, transfers: Transfers, row_of: Any) -> tuple[Seconds, Seconds]:
    """When the last input of each span was sent, and when all had arrived; long ago where nothing was."""
    sent = transfers[transfers.op != "R"]
    microbatches = 1 + int(spans.minibatch.max(initial=0))

    def keys(rows: Keys, op: NDArray[np.str_], minibatch: NDArray[np.int32]) -> Keys:
        of_rows: Keys = (2 * rows + (op == "B")) * microbatches
        return of_rows + minibatch

    known, (sent_s, arrived_s) = _latest(
        keys(row_of(sent.to_stage, sent.to_replica), sent.op, sent.minibatch), sent.start_s, sent.end_s
    )
    if not len(known):
        return np.full(len(spans), -np.inf), np.full(len(spans), -np.inf)
    wanted = keys(row, spans.op, spans.minibatch)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    there = known[at] == wanted
    return np.where(there, sent_s[at], -np.inf), np.where(there, arrived_s[at], -np.inf)


def _reductions(transfers: Transfers, row_of: Any) -> tuple[Keys, Seconds, Seconds]:
    """Of each replica's reductions: its row, the seconds it waited for the others, and those for the sums."""
    of = transfers[transfers.op == "R"]
    if not len(of):
        return np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)
    together = of.to_stage.astype(np.int64) * (1 + int(of.minibatch.max())) + of.minibatch
    known, (last_s, _) = _latest(together, of.start_s, of.end_s)
    last_s = last_s[np.searchsorted(known, together)]
    rows: Keys = row_of(of.to_stage, of.to_replica)
    return rows, last_s - of.start_s, of.end_s - last_s


def _latest(keys: Keys, *seconds: Seconds) -> tuple[Keys, list[Seconds]]:
    """The different keys, in order, and the latest of each key's seconds."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    if not len(first):
        return keys, list(seconds)
    return keys[first], [np.maximum.reduceat(each[order], first) for each in seconds]


def _rows_of(places: list[tuple[int, int]]) -> Any:
    """A function from arrays of stages and replicas to the numbers of their places."""
    stages = 1 + max((stage for stage, _ in places), default=0)
    replicas = 1 + max((replica for _, replica in places), default=0)
    numbers = np.zeros((stages, replicas), dtype=np.int64)
    for n, place in enumerate(places):
        numbers[place] = n

    def row_of(stage: NDArray[np.int32], replica: NDArray[np.int32]) -> Keys:
        found: Keys = numbers[stage, replica]
        return found

    return row_of
