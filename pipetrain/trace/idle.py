"""What a trace tells: why stages waited, when packs were sent and used, what overlapped, which workers were late."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipetrain.schemes.actions import FROM_ABOVE, FROM_BELOW
from pipetrain.schemes.transfers.tictac import Overlap
from pipetrain.trace.records import Seconds, Spans, Transfers, What
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


BETWEEN_REPLICAS = ("B", "F", "R", "W")  # in the order of the alphabet


class PackTimes(NamedTuple):
    """One message of a pack: what it is, the minibatch, its ends, the pack's place in the plan, and its seconds.

    ``used_s`` is its first use, as far as the trace knows, else its arrival. ``inverted``: one that is behind it in the
    plan, and goes the same way, has arrived before it.
    """

    op: What
    microbatch: int
    from_replica: int
    to_replica: int
    pack: int
    size_bytes: int
    sent_s: float
    arrived_s: float
    used_s: float
    inverted: bool


def packs(trace: Trace) -> list[PackTimes]:
    """The messages between replicas whose transfers a plan orders, in the order in which they were sent."""
    sent = messages(trace.transfers)
    return [
        PackTimes(
            each.op,
            each.microbatch,
            each.from_replica,
            each.to_replica,
            each.pack,
            each.size_bytes,
            each.start_s,
            each.end_s,
            each.end_s + each.kept_s,
            wrong,
        )
        for each, wrong in zip(sent, inverted(sent).tolist(), strict=True)
    ]


def messages(transfers: Transfers) -> Transfers:
    """Those that are single messages between two replicas of a stage.

    They are of weights, of gradients to be summed, and on a grid of activations and their gradients.
    """
    among = np.isin(transfers.op, BETWEEN_REPLICAS) & (transfers.from_stage == transfers.to_stage)
    found: Transfers = transfers[among & (transfers.from_replica != transfers.to_replica)]
    return found


def inverted(sent: Transfers) -> NDArray[np.bool_]:
    """Of messages, whether one arrived earlier that goes the same way in the same step and is behind it in the plan."""
    ways = np.stack([np.searchsorted(BETWEEN_REPLICAS, sent.op), sent.microbatch, sent.from_replica, sent.to_replica])
    order = np.lexsort((sent.pack, sent.end_s, *ways))
    begins = (np.diff(ways[:, order].astype(np.int64), axis=1, prepend=-1) != 0).any(axis=0)
    way = np.cumsum(begins)
    key = way * (1 + int(sent.pack.max(initial=0))) + sent.pack[order]
    wrong = np.zeros(len(sent), dtype=bool)
    wrong[order] = key < np.maximum.accumulate(key)
    return wrong


def overlap(trace: Trace) -> dict[int, Overlap]:
    """Of every replica between which messages go, how far computing and transfers go on at the same time in a step.

    Seconds are means of all steps. A message is under way from when it has left until it has arrived, the time
    included in which it queues or shares its way.
    """
    sent, spans = messages(trace.transfers), trace.spans
    steps = max(1, len(np.unique(spans.microbatch)))
    seconds_s = spans.end_s - spans.start_s
    found = {}
    for replica in sorted({*sent.from_replica.tolist(), *sent.to_replica.tolist()}):
        into, out = sent.to_replica == replica, sent.from_replica == replica
        under_way = [_together_s(sent.start_s[each], sent.end_s[each]) / steps for each in (into | out, into, out)]
        found[replica] = Overlap(trace.step_s, float(seconds_s[spans.replica == replica].sum()) / steps, *under_way)
    return found


def _together_s(starts_s: Seconds, ends_s: Seconds) -> float:
    """The seconds in which there is any of these."""
    order = np.argsort(starts_s)
    starts_s, ends_s = starts_s[order], np.maximum.accumulate(ends_s[order])
    return float(np.maximum(0.0, ends_s - np.maximum(starts_s, np.concatenate([[-np.inf], ends_s])[:-1])).sum())


RESOLUTION_S = 1e-9  # of seconds that are sums of others
Keys = NDArray[np.int64]
Cause = Literal["transfer", "imbalance", "fill"]


class Idle(NamedTuple):
    """The seconds in which one replica of a stage did not compute.

    ``transfer_s``: everything that it waited for was computed and being transferred. ``imbalance_s``: an input was not
    yet computed, or no processor was free, or the next minibatch had not arrived. ``fill_s``: the time before its first
    action and after its last one, of the trace and of each drain.
    """

    transfer_s: float
    imbalance_s: float
    fill_s: float

    @property
    def total_s(self) -> float:
        """The seconds of all causes; the rest of the trace's duration the replica computed, or copied what it sent."""
        return sum(self)


class IdleSpan(NamedTuple):
    """A time in which one replica of a stage was idle, and why: see ``Idle``."""

    stage: int
    replica: int
    start_s: float
    end_s: float
    cause: Cause


def idle(trace: Trace) -> dict[tuple[int, int], Idle]:
    """For every stage and replica of the trace, the seconds in which it was idle, by cause.

    The time in which replicas wait for each other's gradients, within the span of a backward, is idle too:
    ``imbalance`` until the last replica has computed its gradients, ``transfer`` after that. Where a plan orders the
    transfers, what a replica waits for before its next action are the messages that have arrived until then. In a trace
    without transfers no idle time is assigned to them.
    """
    places = trace.rows
    seconds: dict[Cause, Seconds] = {cause: np.zeros(len(places)) for cause in ("transfer", "imbalance", "fill")}
    for cause, row, start_s, end_s in _pauses(trace, places):
        seconds[cause] += np.bincount(row, end_s - start_s, len(places))
    figures = zip(*(each.tolist() for each in seconds.values()), strict=True)
    return {place: Idle(*each) for place, each in zip(places, figures, strict=True)}


def pauses(trace: Trace) -> list[IdleSpan]:
    """When every stage and replica of the trace was idle, in order of place and start: what ``idle`` sums."""
    places = trace.rows
    found = [
        IdleSpan(places[row][0], places[row][1], start_s, end_s, cause)
        for cause, rows, starts_s, ends_s in _pauses(trace, places)
        for row, start_s, end_s in zip(rows.tolist(), starts_s.tolist(), ends_s.tolist(), strict=True)
        if end_s > start_s
    ]
    return sorted(found)


def _pauses(trace: Trace, places: list[tuple[int, int]]) -> Iterator[tuple[Cause, Keys, Seconds, Seconds]]:
    """Cause by cause the rows, starts and ends of the times in which they were idle; some are of no length."""
    row_of = _rows_of(places)
    spans = trace.spans
    row = row_of(spans.stage, spans.replica)
    order = np.lexsort((spans.start_s, row))
    spans, row = spans[order], row[order]
    first, last = np.diff(row, prepend=-1) != 0, np.diff(row, append=len(places)) != 0
    begin_s = np.where(first, 0.0, np.concatenate([[0.0], spans.end_s])[:-1])
    begin_s = np.minimum(begin_s, spans.start_s)
    fill = np.searchsorted(np.sort(trace.starts), spans.microbatch, side="right")  # after how many starts
    refilled = first | (np.diff(fill, prepend=0) > 0)
    yield "fill", row[refilled], begin_s[refilled], spans.start_s[refilled]
    yield "fill", row[last], spans.end_s[last], np.full(int(last.sum()), trace.duration_s)
    transfers = _among(trace.transfers, places)
    sent_s, arrived_s = _inputs(spans, row, transfers, row_of)
    _add_messages(spans, row, messages(transfers), row_of, begin_s, sent_s, arrived_s)
    waits = ~refilled
    row, begin_s, start_s = row[waits], begin_s[waits], spans.start_s[waits]
    left_s = np.clip(sent_s[waits], begin_s, start_s)
    there_s = np.clip(arrived_s[waits], left_s, start_s)
    yield "imbalance", row, begin_s, left_s
    yield "transfer", row, left_s, there_s
    yield "imbalance", row, there_s, start_s
    row, began_s, together_s, ended_s = _reductions(transfers, row_of)
    yield "imbalance", row, began_s, together_s
    yield "transfer", row, together_s, ended_s


def _among(transfers: Transfers, places: list[tuple[int, int]]) -> Transfers:
    """Those to a reader that did anything: where training was stopped, some may not have."""
    replicas = 1 + int(transfers.to_replica.max(initial=max((replica for _, replica in places), default=0)))
    known = [stage * replicas + replica for stage, replica in places]
    return transfers[np.isin(transfers.to_stage.astype(np.int64) * replicas + transfers.to_replica, known)]


def _inputs(spans: Spans, row: Keys, transfers: Transfers, row_of: Any) -> tuple[Seconds, Seconds]:
    """When the last input of each span was sent, and when all had arrived; long ago where nothing was.

    What is sent is for the next such action of its reader.
    """
    sent = transfers[np.isin(transfers.op, ("F", "B"))]
    microbatches = 1 + max(int(each.microbatch.max(initial=0)) for each in (spans, sent))

    def keys(rows: Keys, op: NDArray[np.str_], microbatch: NDArray[np.int32]) -> Keys:
        kind = np.where(np.isin(op, FROM_ABOVE), 0, np.where(np.isin(op, FROM_BELOW), 1, 2))  # what is sent: F or B
        of_rows: Keys = (3 * rows + kind) * microbatches
        return of_rows + microbatch

    key = np.concatenate(
        [keys(row_of(sent.to_stage, sent.to_replica), sent.op, sent.microbatch), keys(row, spans.op, spans.microbatch)]
    )
    is_span = np.arange(len(key)) >= len(sent)
    order = np.lexsort((is_span, np.concatenate([sent.start_s, spans.start_s]), key))
    place = np.where(is_span[order], np.arange(len(key)), len(key))
    following = np.minimum.accumulate(place[::-1])[::-1]  # in that order, the place of the next span
    taken = ~is_span[order] & (following < len(key))
    reader = order[following[taken]]
    message = order[taken]
    fits = key[reader] == key[message]
    reader, message = reader[fits] - len(sent), message[fits]
    sent_s, arrived_s = np.full(len(spans), -np.inf), np.full(len(spans), -np.inf)
    np.maximum.at(sent_s, reader, sent.start_s[message])
    np.maximum.at(arrived_s, reader, sent.end_s[message])
    return sent_s, arrived_s


def _add_messages(
    spans: Spans, row: Keys, sent: Transfers, row_of: Any, begin_s: Seconds, sent_s: Seconds, arrived_s: Seconds
) -> None:
    """Add messages of a plan to the inputs of the spans, in order of row and start, before which they arrived.

    Only those count that arrived in the pause, which begins then; of what they waited for each other, they are taken to
    have been on their way since the first of them was sent.
    """
    reader, ends = row_of(sent.to_stage, sent.to_replica), np.searchsorted(row, np.arange(1 + int(row.max(initial=0))))
    for place in np.unique(reader).tolist():
        mine, first = sent[reader == place], int(ends[place])
        starts_s = spans.start_s[first:][row[first:] == place]
        span = np.searchsorted(starts_s, mine.end_s - RESOLUTION_S)
        taken = span < len(starts_s)
        at = first + span[taken]
        late = mine.end_s[taken] > begin_s[at]
        at, left_s, there_s = at[late], mine.start_s[taken][late], mine.end_s[taken][late]
        begun_s = np.full(len(spans), np.inf)
        np.minimum.at(begun_s, at, left_s)
        np.maximum.at(arrived_s, at, there_s)
        sent_s[at] = np.maximum(sent_s[at], begun_s[at])


def _reductions(transfers: Transfers, row_of: Any) -> tuple[Keys, Seconds, Seconds, Seconds]:
    """Of each replica's reductions: its row, when it began, when the last of the replicas did, and when it ended."""
    of = transfers[(transfers.op == "R") & (transfers.from_replica == transfers.to_replica)]
    if not len(of):
        return np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0), np.zeros(0)
    together = of.to_stage.astype(np.int64) * (1 + int(of.microbatch.max())) + of.microbatch
    order = np.lexsort((of.start_s, together))
    of, together = of[order], together[order]
    # Replicas leave a sum after the last one came to it: who comes later than that is of another time.
    apart = (np.diff(together) != 0) | (of.start_s[1:] > of.end_s[:-1])
    begins = np.flatnonzero(np.concatenate([[True], apart]))
    counts = np.diff(np.append(begins, len(of)))
    last_s = np.repeat(np.maximum.reduceat(of.start_s, begins), counts)
    rows: Keys = row_of(of.to_stage, of.to_replica)
    return rows, of.start_s, last_s, of.end_s


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
