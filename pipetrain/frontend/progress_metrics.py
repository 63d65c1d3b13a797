"""What the progress bar says of a running pipeline: how fast it is, how full, and how much of it waits."""

from __future__ import annotations

from pipetrain.checkpoint.training_time import TrainingTime
from pipetrain.run.pipeline import Activity


class ProgressMetrics:
    """Figures of an epoch so far: samples/s, the most microbatches in flight, and the share of all stages' time idle.

    ``samples_per_s = rows / s``, ``bubble = 1 - busy seconds of all ranks / (ranks * s)``, where ``s`` are the
    seconds that training took, without evaluations and snapshots, from the end of the epoch's first step on by which
    every stage has made an update: before it, stages are made and their functions are traced. ``samples_per_second`` in
    the summaries of ``experiments/run.py`` is the same quantity, between two steps far from the first.

    Args:
        time: that training takes.
    """

    def __init__(self, time: TrainingTime) -> None:
        self._time = time
        self._since_s: float | None = None

    def begin_epoch(self) -> None:
        """The next step is an epoch's first."""
        self._since_s = None

    def figures(self, rows: int, activity: Activity) -> dict[str, float]:
        """What to show after a step, with so many rows in all; empty while there is nothing to measure from."""
        seconds, busy_s = self._time.seconds, activity.busy_s or 0.0
        if self._since_s is None:
            if activity.updated:
                self._since_s, self._rows, self._busy_s, self._most = seconds, rows, busy_s, 0
            return {}
        passed_s = max(seconds - self._since_s, 1e-9)
        self._most = max(self._most, activity.most_in_flight)
        shown: dict[str, float] = {"samples_per_s": round((rows - self._rows) / passed_s), "in_flight": self._most}
        if activity.busy_s is not None:
            busy = (busy_s - self._busy_s) / (passed_s * activity.ranks)
            shown["bubble"] = round(min(max(1 - busy, 0.0), 1.0), 2)
        return shown
