"""The spans and transfers of a run, measured or simulated; those of old files too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipetrain.logs import counted
from pipetrain.pictures.tables import Tabular, table
from pipetrain.trace.records import CATEGORIES, ENDING, OPS, Integers, Seconds, Span, Spans, Transfer, Transfers

if TYPE_CHECKING:
    from pipetrain.pictures.figure import Picture


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


class Trace(Tabular):
    """The spans and transfers of one run, in order of their start.

    Its rows, for pandas and for CSV files, are the spans.

    Microbatches (of schemes that have none, minibatches) and versions are numbered through, whenever the pipeline was
    drained in between.

    Both are sequences of named tuples, and have an array for each field: ``trace.spans.start_s``. ``ranks`` is the
    number of devices that execute one action at a time, if it is not that of stages and replicas: a device may have
    several stages. ``starts`` are the microbatches that came first when the pipeline was empty: the first one of all,
    and the first one after each drain. ``period`` is the number of minibatches after which steps repeat, such as those
    of workers that join their weights after so many.
    """

    def __init__(
        self,
        spans: Iterable[Span] = (),
        transfers: Iterable[Transfer] = (),
        ranks: int | None = None,
        starts: Iterable[int] = (),
        period: int = 1,
    ) -> None:
        self.spans, self.transfers = Spans.of(spans), Transfers.of(transfers)
        self._ranks, self.starts, self.period = ranks, tuple(starts), int(period)

    @classmethod
    def of(
        cls,
        spans: Iterable[Span],
        transfers: Iterable[Transfer] = (),
        ranks: int | None = None,
        starts: Iterable[int] = (),
        period: int = 1,
    ) -> Trace:
        """Order the spans and transfers and count time from the first span's start."""
        given, sent = Spans.of(spans), Transfers.of(transfers)
        ordered = given[np.lexsort((given.stage, given.start_s))]
        sent = sent[np.lexsort((sent.to_stage, sent.start_s))]
        origin = ordered.start_s[0] if len(ordered) else 0.0
        if origin:
            ordered = replace(ordered, start_s=ordered.start_s - origin, end_s=ordered.end_s - origin)
            sent = replace(sent, start_s=sent.start_s - origin, end_s=sent.end_s - origin)
        return cls(ordered, sent, ranks, starts, period)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self.spans == other.spans and self.transfers == other.transfers

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Trace({len(self.spans)} spans of {self.stages} stages, {self.duration_s:.3g} s)"

    def plot(
        self, path: str | Path | None = None, first: int | None = None, minibatches: int = 12, title: str = ""
    ) -> Picture:
        """A timeline: what each stage, or device of several, did and when, and why it was idle.

        Needs matplotlib: ``pip install "pipetrain[plot]"``.

        Args:
            path: a file to save it to, of the kind that its name ends in.
            first: the first minibatch, or microbatch of schemes that have them; by default one of a part in which the
                pipeline is full.
            minibatches: how many are shown, or microbatches.
            title: by default what the trace is.

        Returns:
            The matplotlib figure. Raises ValueError where the trace has no such minibatches.
        """
        from pipetrain.trace import timeline

        return timeline.draw(self, first, minibatches, title or self._title).saved(path)

    @property
    def _title(self) -> str:
        """What it is, in a line."""
        rows = f"{self.ranks} devices" if self.devices_are_shared else counted(self.stages, "stage")
        return f"Timeline of {rows}: {self.steady_bubble():.0%} idle in the steady state"

    def _repr_html_(self) -> str:
        from pipetrain.trace.idle import idle

        waited, total_s = idle(self), self.duration_s or 1.0
        rows = [
            (name, *(f"{part:.1%}" for part in (1 - why.total_s / total_s, *(each / total_s for each in why))))
            for name, why in zip(self.row_names(), waited.values(), strict=True)
        ]
        title = f"Trace of {counted(len(self.spans), 'action')}, {self.duration_s:.3g} s"
        header = ("stage", "at work", "idle: transfers", "idle: imbalance", "idle: filling, draining")
        return table(title, header, rows)

    def _columns(self) -> dict[str, Sequence[Any]]:
        return {field.name: column.tolist() for field, column in zip(fields(Spans), self.spans.columns, strict=True)}

    @property
    def stages(self) -> int:
        """How many stages the run had."""
        return 1 + int(self.spans.stage.max(initial=-1))

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Every stage and replica that did anything, in order."""
        replicas = 1 + int(self.spans.replica.max(initial=0))
        present = np.unique(self.spans.stage.astype(np.int64) * replicas + self.spans.replica)
        return [divmod(place, replicas) for place in present.tolist()]

    @property
    def ranks(self) -> int:
        """How many there are that do one action at a time: those of all stages and replicas, unless some share one."""
        return len(self.rows) if self._ranks is None else self._ranks

    @property
    def devices_are_shared(self) -> bool:
        """Whether a device has several stages, of which it executes one action at a time."""
        return self.ranks < len(self.rows)

    @property
    def duration_s(self) -> float:
        """Seconds from the first span's start to the last one's end."""
        return float(self.spans.end_s.max(initial=0.0))

    @property
    def step_s(self) -> float:
        """Seconds per minibatch while the pipeline is full: between the last stage's updates, in the middle half.

        Of whole periods: of the last one, if none is as short as that, and of the whole trace, if there is none.
        """
        _, ends_s = self._updates()
        first, last = self._middle(len(ends_s))
        if first >= last:
            return self.duration_s / max(1, len(ends_s))
        return float(ends_s[last] - ends_s[first]) / (last - first)

    def _middle(self, updates: int) -> tuple[int, int]:
        """The first and the last of so many updates between which the pipeline is full; no periods are cut."""
        first, last = updates // 4, updates - 1 - updates // 4
        if last - first < self.period < updates:
            return updates - 1 - self.period, updates - 1
        return first, first + (last - first) // self.period * self.period

    def _updates(self) -> tuple[Integers, Seconds]:
        """The last stage's updates: of each the last microbatch, and when its backward ended."""
        mine = (self.spans.stage == self.stages - 1) & (self.spans.replica == 0) & np.isin(self.spans.op, ENDING)
        backwards = self.spans[mine]
        last = np.diff(backwards.version, append=-1) != 0
        return backwards.microbatch[last], backwards.end_s[last]

    def busy_s(self, stage: int) -> float:
        """Seconds that a stage spent in its actions."""
        mine = self.spans.stage == stage
        return float((self.spans.end_s[mine] - self.spans.start_s[mine]).sum())

    def bubble(self) -> float:
        """The share of all ranks' time in which they did nothing, from 0 to 1."""
        if not len(self.spans) or not self.duration_s:
            return 0.0
        busy = float((self.spans.end_s - self.spans.start_s).sum())
        return 1.0 - busy / (self.duration_s * self.ranks)

    def steady_bubble(self) -> float:
        """The same of a minibatch while training goes on, without the pipeline's filling and draining.

        ``1 - busy_s / (ranks * step_s)``, where ``busy_s`` are the mean seconds that a minibatch of the middle half
        takes on all ranks; at least 0. That of a trace of fewer than four minibatches, or of no whole period, is
        ``bubble``.
        """
        numbers, _ = self._updates()
        first, last = self._middle(len(numbers))
        if first == 0 or first >= last:
            return self.bubble()
        mine = (self.spans.microbatch > numbers[first]) & (self.spans.microbatch <= numbers[last])
        busy_s = float((self.spans.end_s - self.spans.start_s)[mine].sum()) / (last - first)
        return max(0.0, 1.0 - busy_s / (self.ranks * self.step_s))

    def to_chrome(self) -> dict[str, Any]:
        """The trace in Chrome's format (chrome://tracing, ui.perfetto.dev).

        A row per stage and replica, and one for the transfers from each to each; times in microseconds.
        """
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
            for row, name in enumerate(self.row_names())
        ]
        row_of = {place: row for row, place in enumerate(self.rows)}
        events = [_event(span, row_of[span.stage, span.replica]) for span in self.spans]
        sent = [half for number, transfer in enumerate(self.transfers) for half in _halves(transfer, number)]
        shared = {} if self._ranks is None else {"ranks": self._ranks}
        other = {**shared, "starts": list(self.starts), "period": self.period}
        return {"displayTimeUnit": "ms", "traceEvents": names + events + sent, "otherData": other}

    def row_names(self) -> list[str]:
        """The name of each of ``rows``."""
        several = {stage for stage, replica in self.rows if replica}
        return [f"stage {stage}" + f", replica {replica}" * (stage in several) for stage, replica in self.rows]

    def save(self, path: str | Path) -> None:
        """Write Chrome's JSON to a file."""
        Path(path).write_text(json.dumps(self.to_chrome()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file that ``save`` wrote."""
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        events, other = data["traceEvents"], data.get("otherData", {})
        spans = Spans.of(_span(event) for event in events if event["ph"] == "X")
        sent = Transfers.of(_transfer(event) for event in events if event["ph"] == "b")
        if "starts" not in other:
            spans, sent, other["starts"] = numbered_through(spans, sent)
        return cls(spans, sent, other.get("ranks"), other["starts"], other.get("period", 1))


def _event(span: Span, row: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{span.op}{span.microbatch}",
        "cat": CATEGORIES[span.op],
        "pid": 0,
        "tid": row,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {
            "microbatch": span.microbatch,
            "device": span.device,
            "weight_version": span.version,
            "stage": span.stage,
            "replica": span.replica,
        },
    }


def _span(event: dict[str, Any]) -> Span:
    args = event["args"]
    return Span(
        op=OPS[event["cat"]],  # type: ignore[arg-type]
        stage=args["stage"],
        microbatch=_microbatch(args),
        device=args["device"],
        start_s=event["ts"] / 1e6,
        end_s=(event["ts"] + event["dur"]) / 1e6,
        version=args["weight_version"],
        replica=args["replica"],
    )


def _halves(transfer: Transfer, number: int) -> Iterator[dict[str, Any]]:
    """A transfer as the beginning and the end of an asynchronous event, of which several may go on at once."""
    common = {"name": f"{transfer.op}{transfer.microbatch}", "cat": "transfer", "id": number, "pid": 1}
    way = f"{transfer.from_stage}.{transfer.from_replica} to {transfer.to_stage}.{transfer.to_replica}"
    args = {**transfer._asdict(), "way": way}
    yield {"ph": "b", **common, "ts": transfer.start_s * 1e6, "args": args}
    yield {"ph": "e", **common, "ts": transfer.end_s * 1e6}


def _transfer(event: dict[str, Any]) -> Transfer:
    args = event["args"] | {"microbatch": _microbatch(event["args"])}
    return Transfer(**{name: args[name] for name in Transfer._fields if name in args})


def _microbatch(args: dict[str, Any]) -> int:
    """Its number; traces of version 0.1 have it under the name ``minibatch``."""
    return int(args["microbatch"] if "microbatch" in args else args["minibatch"])
