"""What the progress bar says of a running pipeline: how fast it is, how full, and how much of it waits."""

from __future__ import annotations

import time

from pipetrain.run.pipeline import Activity


class ProgressMetrics:
    """Figures of an epoch so far: samples/s, the most microbatches in flight, and the share of all stages' time idle.

    ``bubble = 1 - busy seconds of all workers / (workers * seconds)``, from the first step's end on: before it, stages
    are made.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None

    def begin_epoch(self) -> None:
        """The next step is an epoch's first."""
        self._since_s = None

    def figures(self, rows: int, activity: Activity | None) -> dict[str, float]:
        """What to show after so many rows in all; empty after an epoch's first step."""
        now_s, busy_s = time.perf_counter(), (activity.busy_s or 0.0) if activity else 0.0
        if self._since_s is None:
            self._since_s, self._rows, self._busy_s, self._most = now_s, rows, busy_s, 0
            return {}
        passed_s = max(now_s - self._since_s, 1e-9)
        shown: dict[str, float] = {"samples_per_s": round((rows - self._rows) / passed_s)}
        if activity is not None:
            self._most = max(self._most, activity.most_in_flight)
            shown["in_flight"] = self._most
        if activity is not None and activity.busy_s is not None:
            busy = (busy_s - self._busy_s) / (passed_s * activity.workers)
            shown["bubble"] = round(min(max(1 - busy, 0.0), 1.0), 2)
        return shown
