"""What the logs of an epoch say of a pipeline beside its metrics: how fast it was, and how much of it waited."""

from __future__ import annotations

from typing import NamedTuple

from pipetrain.checkpoint.training_time import TrainingTime
from pipetrain.run.pipeline import Activity

NAMES = "samples_per_s", "bubble"


class _Moment(NamedTuple):
    """Seconds of training, rows and busy seconds up to now."""

    seconds: float
    rows: int
    busy_s: float


class EpochMetrics:
    """Figures of an epoch: samples/s, and the share of all stages' time in which they waited.

    ``samples_per_s = rows / s``, ``bubble = 1 - busy seconds of all ranks / (ranks * s)``, where ``s`` are the
    seconds that training took, without evaluations and snapshots, from the end of the epoch's first step on by which
    every stage has made an update: before it, stages are made and their functions are traced. Where no rows come after
    that step, they are those from the epoch's beginning on. ``samples_per_second`` in the summaries of
    ``experiments/run.py`` is the same quantity, between two steps far from the first.

    Args:
        time: that training takes.
    """

    def __init__(self, time: TrainingTime) -> None:
        self._time = time
        self._begun = _Moment(0.0, 0, 0.0)
        self._since: _Moment | None = None

    def begin_epoch(self, rows: int, activity: Activity | None) -> None:
        """The next step is an epoch's first, with so many rows before it; there is no activity before the first one."""
        self._begun, self._since = self._now(rows, activity), None

    def end_step(self, rows: int, activity: Activity) -> None:
        """A step has ended, with so many rows in all."""
        if self._since is None and activity.updated:
            self._since = self._now(rows, activity)

    def of_epoch(self, rows: int, activity: Activity) -> dict[str, float]:
        """The figures of the epoch that has ended, with so many rows in all.

        ``bubble`` is left out where nobody knows it: on GPUs and workers, unless the trace has exact times.
        """
        since = self._begun if self._since is None or self._since.rows == rows else self._since
        now = self._now(rows, activity)
        passed_s = max(now.seconds - since.seconds, 1e-9)
        figures = {NAMES[0]: round((rows - since.rows) / passed_s, 1)}
        if activity.busy_s is not None:
            busy = (now.busy_s - since.busy_s) / (passed_s * activity.ranks)
            figures[NAMES[1]] = round(min(max(1 - busy, 0.0), 1.0), 4)
        return figures

    def _now(self, rows: int, activity: Activity | None) -> _Moment:
        return _Moment(self._time.seconds, rows, (activity and activity.busy_s) or 0.0)
