"""One ``fit`` by a runner: minibatches in, logs out, and the figures of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pipetrain.checkpoint.training_time import TrainingTime
from pipetrain.compute.gc_pause import gc_paused
from pipetrain.frontend.attributes import known
from pipetrain.frontend.compilation import Compilation
from pipetrain.frontend.fit_session import FitSession
from pipetrain.frontend.metrics import StepMetrics
from pipetrain.frontend.update_count import UpdateCount
from pipetrain.run.collector import Result
from pipetrain.run.pipeline import Activity
from pipetrain.run.window import Minibatch, Window

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


class RunnerFit:
    """Lives from the beginning of a ``fit`` to its end; keeps the runner full, and the metrics in step with it.

    Args:
        session: of this ``fit``.
        compilation: what the model was compiled with.
        runner: gives the runner for data of which the first minibatch has been read.
        count: of the updates.
        ahead: whether minibatches are read ahead of their turn.
    """

    def __init__(
        self,
        session: FitSession,
        compilation: Compilation,
        runner: Callable[[], Any],
        count: UpdateCount,
        ahead: bool,
    ) -> None:
        self.session, self._compilation = session, compilation
        self._runner, self._count, self._ahead = runner, count, ahead
        self._steps: int | None = None
        self._window: Window | None = None
        self._step_metrics: StepMetrics | None = None
        self._rows_done = 0  # of all minibatches whose results some step has taken
        self._running: Any = None  # once its data are read
        self._epoch = EpochMetrics(session.time)

    def begin_epoch(self, steps: int | None) -> None:
        """The next step reads from a new iterator, at most so many minibatches."""
        self._steps, self._window, self._step_metrics = steps, None, None
        self._epoch.begin_epoch(self._rows_done, self._running.activity() if self._running else None)

    def step(self, iterator: Iterator[Any]) -> Any:
        """The logs of the next minibatch; later ones are in flight. Raises StopIteration at the data's end."""
        if self._window is None:
            with gc_paused():  # the stages are traced, if this is the first epoch
                self._window = self._open(iterator)
        minibatch, result = self._window.step()
        self._rows_done += minibatch.x[0].shape[0]
        self._epoch.end_step(self._rows_done, known(self._running).activity())
        return self._logs(minibatch, result)

    def _open(self, iterator: Iterator[Any]) -> Window:
        minibatches = self._compilation.data.open(iterator, self._steps, self._ahead)
        self._running = runner = self._runner()
        self._compilation.data.first = None  # which nobody asks for any more
        return Window(runner, minibatches, self._steps, lambda n: self.session.drains_after(n), self._count.updates)

    def _logs(self, minibatch: Minibatch, result: Result, counts: bool = True) -> Any:
        """Update the metrics, and the optimizer's count if it ``counts``."""
        if self._step_metrics is None:
            self._step_metrics = self._compilation.metrics.of_training(self._compilation.data.targets)
        return self._step_metrics(minibatch, result, counts)

    def count_stopped(self) -> None:
        """Of an epoch that was stopped, the metrics count the minibatches that no step takes any more."""
        if self._window is not None and self.session.stopped and not self.session.is_evaluating:
            for minibatch, result in self._window.remaining():
                self._logs(minibatch, result, counts=False)  # the optimizer has, since they are done

    def end(self) -> None:
        """Let go of the data: what refers to this in a circle would keep their threads until garbage is collected."""
        self._window = None

    @property
    def in_flight(self) -> int:
        """How many minibatches are under way whose results no step has taken."""
        return self._window.in_flight if self._window else 0

    def figures(self) -> Mapping[str, float]:
        """For the logs of an epoch that has ended: empty if it had no step."""
        return self._epoch.of_epoch(self._rows_done, self._running.activity()) if self._running else {}
