"""One ``fit`` by a pipeline: minibatches in, logs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipetrain.checkpoint.session import FitSession
from pipetrain.compute.gc_pause import gc_paused
from pipetrain.frontend.attributes import known
from pipetrain.frontend.compilation import Compilation
from pipetrain.frontend.epoch_metrics import EpochMetrics
from pipetrain.frontend.metrics import StepMetrics
from pipetrain.run.collector import Result
from pipetrain.run.pipeline import Pipeline
from pipetrain.run.window import Minibatch, Window


class PipelineFit:
    """Lives from the beginning of a ``fit`` to its end; keeps the pipeline full, and the metrics in step with it.

    Args:
        session: of this ``fit``.
        compilation: what the model was compiled with.
        pipeline: gives the pipeline for data of which the first minibatch has been read.
        updates: gives those of the optimizer up to the last drain.
        ahead: whether minibatches are read ahead of their turn.
    """

    def __init__(
        self,
        session: FitSession,
        compilation: Compilation,
        pipeline: Callable[[], Pipeline],
        updates: Callable[[], int],
        ahead: bool,
    ) -> None:
        self.session, self._compilation = session, compilation
        self._pipeline, self._updates, self._ahead = pipeline, updates, ahead
        self._steps: int | None = None
        self._window: Window | None = None
        self._step_metrics: StepMetrics | None = None
        self._rows_done = 0  # of all minibatches whose results some step has taken
        self._running: Pipeline | None = None  # once its data are read
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
        self._running = pipeline = self._pipeline()
        self._compilation.data.first = None  # which nobody asks for any more
        return Window(pipeline, minibatches, self._steps, lambda n: self.session.drains_after(n), self._updates())

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
