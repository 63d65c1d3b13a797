"""What happened when: the spans of a run, measured or simulated."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipetrain.plan.actions import Op


class Span(NamedTuple):
    """One action of one replica of a stage, in seconds since the trace's start, and the version it began with."""

    op: Op
    stage: int
    minibatch: int
    device: str
    start_s: float
    end_s: float
    version: int
    replica: int = 0


@dataclass(frozen=True)
class Trace:
    """The spans of one run, in order of their start."""

    spans: tuple[Span, ...]

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Trace:
        """Order the spans and count time from the first one's start."""
        ordered = sorted(spans, key=lambda span: (span.start_s, span.stage))
        origin = ordered[0].start_s if ordered else 0.0
        return cls(tuple(s._replace(start_s=s.start_s - origin, end_s=s.end_s - origin) for s in ordered))

    @property
    def stages(self) -> int:
        """How many stages the run had."""
        return 1 + max((span.stage for span in self.spans), default=-1)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Every stage and replica that did anything, in order."""
        return sorted({(span.stage, span.replica) for span in self.spans})

    @property
    def duration_s(self) -> float:
        """Seconds from the first span's start to the last one's end."""
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self, stage: int) -> float:
        """Seconds that a stage spent in its actions."""
        return sum(span.end_s - span.start_s for span in self.spans if span.stage == stage)

    def bubble(self) -> float:
        """The share of all stages' time in which they did nothing, from 0 to 1."""
        if not self.spans:
            return 0.0
        busy = sum(self.busy_s(stage) for stage in range(self.stages))
        return 1.0 - busy / (self.duration_s * len(self.rows))

    def to_chrome(self) -> dict[str, Any]:
        """The trace in Chrome's format (chrome://tracing, ui.perfetto.dev).

        A row per stage and replica, times in microseconds.
        """
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
            for row, name in enumerate(self.row_names())
        ]
        row_of = {place: row for row, place in enumerate(self.rows)}
        events = [_event(span, row_of[span.stage, span.replica]) for span in self.spans]
        return {"displayTimeUnit": "ms", "traceEvents": names + events}

    def row_names(self) -> list[str]:
        """For people: what each of ``rows`` is."""
        several = {stage for stage, replica in self.rows if replica}
        return [f"stage {stage}" + f", replica {replica}" * (stage in several) for stage, replica in self.rows]

    def save(self, path: str | Path) -> None:
        """Write Chrome's JSON to a file."""
        Path(path).write_text(json.dumps(self.to_chrome()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file that ``save`` wrote."""
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        return cls(tuple(_span(event) for event in events if event["ph"] == "X"))


def _event(span: Span, row: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{span.op}{span.minibatch}",
        "cat": "forward" if span.op == "F" else "backward",
        "pid": 0,
        "tid": row,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {
            "minibatch": span.minibatch,
            "device": span.device,
            "weight_version": span.version,
            "stage": span.stage,
            "replica": span.replica,
        },
    }


def _span(event: dict[str, Any]) -> Span:
    args = event["args"]
    return Span(
        op="F" if event["cat"] == "forward" else "B",
        stage=args["stage"],
        minibatch=args["minibatch"],
        device=args["device"],
        start_s=event["ts"] / 1e6,
        end_s=(event["ts"] + event["dur"]) / 1e6,
        version=args["weight_version"],
        replica=args["replica"],
    )
