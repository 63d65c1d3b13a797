"""What the progress bar says of a running pipeline: how fast it is, how full, and how much of it waits."""

from __future__ import annotations

import time

from pipetrain.run.pipeline import Activity

LOOK_S = 1.0  # figures are of so long a time, so that they can be read


class Pulse:
    """Figures of the last second: samples/s, the most microbatches in flight, and the share of all stages' time idle.

    ``bubble = 1 - busy seconds of all workers / (workers * seconds)``.
    """

    def __init__(self) -> None:
        self._since_s, self._rows, self._busy_s = time.perf_counter(), 0, 0.0
        self._shown: dict[str, float] = {}

    def figures(self, rows: int, activity: Activity | None) -> dict[str, float]:
        """What to show after so many rows in all; empty in the first second."""
        now_s = time.perf_counter()
        passed_s = now_s - self._since_s
        if passed_s < LOOK_S:
            return self._shown
        self._shown["samples_per_s"] = round((rows - self._rows) / passed_s)
        if activity is not None:
            busy_s = min(max(activity.busy_s - self._busy_s, 0.0), passed_s * activity.workers)
            self._shown |= {"in_flight": activity.most_in_flight} if activity.most_in_flight else {}
            self._shown["bubble"] = round(1 - busy_s / (passed_s * activity.workers), 2)
            self._busy_s = activity.busy_s
        self._since_s, self._rows = now_s, rows
        return self._shown
