"""One ``fit`` by a runner: minibatches in, logs out; its updates, its snapshots, and the figures of an epoch."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.checkpoint.state import TrainingTime
from pipetrain.compute.functions.kernels import gc_paused
from pipetrain.compute.graph.inputs import beside
from pipetrain.compute.keras_private import count_of
from pipetrain.compute.optimizer.gradient_scaling import is_dynamic, stepping
from pipetrain.frontend.compilation import Compilation
from pipetrain.frontend.contexts import known
from pipetrain.frontend.fit_session import FitSession
from pipetrain.frontend.metrics import StepMetrics
from pipetrain.run.collector import Result
from pipetrain.run.pipeline import Activity, Pipeline
from pipetrain.run.window import Minibatch, Window, never


def handed_out(pipeline: Pipeline, model: keras.Model) -> Iterator[int]:
    """Each version kept by now: the model holds its weights, and the stages rest, until the next is asked for.

    At the end the model has the weights that it had, unless the pipeline has handed back others meanwhile.
    """
    if not pipeline.snapshots:
        return
    variables = [*model.variables, *beside(model)]
    newest, drained = [tf.identity(variable.value) for variable in variables], pipeline.is_drained
    with pipeline.paused():
        try:
            while pipeline.snapshots:
                snapshot = pipeline.snapshots.popleft()
                pipeline.restore(snapshot)
                yield snapshot.version
        finally:  # after a drain they are what training goes on with; an abort has handed back newer ones
            if pipeline.is_drained == drained:
                for variable, value in zip(variables, newest, strict=True):
                    variable.assign(value)


class UpdateCount:
    """The updates of one strategy, since its optimizer was made and since a ``fit`` began.

    Keras' step counts the minibatch whose result it takes; a runner has made updates for later minibatches too. Those
    are added when it drains. The count of an optimizer that another one wraps, to scale the loss, is of the minibatches
    that made a step: it is right after a drain only.

    ``told`` counts the minibatches since the last drain that the compiled optimizer has been told of.
    """

    def __init__(self) -> None:
        self.told = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._optimizer: keras.optimizers.Optimizer | None = None
        self._fitted_before = self._made_before = 0  # of this fit, and of the runner, when they were last set

    def learn_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """The compiled optimizer is another one."""
        self._optimizer = optimizer

    @property
    def variable(self) -> Any:
        """The compiled optimizer's own count."""
        return count_of(known(self._optimizer))

    @property
    def updates(self) -> int:
        """Those of the optimizer up to the last drain."""
        return int(self.variable.numpy()) - int(self.told.numpy())

    @property
    def steps(self) -> int:
        """The steps among these; of a scaled loss, those that were not skipped, as counted at the last drain."""
        optimizer = known(self._optimizer)
        return int(count_of(stepping(optimizer)).numpy()) if is_dynamic(optimizer) else self.updates

    def set(self, updates: int) -> None:
        """The optimizer has made so many."""
        self.variable.assign(updates)

    def go_on(self, taken: int) -> None:
        """A run goes on, of which the optimizer has been told of so many minibatches since it last drained."""
        self.told.assign(taken)
        self._fitted_before -= taken

    def set_fitted(self, updates: int, runner: Any) -> None:
        """This ``fit`` has made so many by now."""
        self._fitted_before, self._made_before = updates, runner.made if runner else 0

    def fitted(self, runner: Any) -> int:
        """Updates since the start of ``fit``, up to the last drain."""
        return self._fitted_before + runner.made - self._made_before if runner else 0

    @contextmanager
    def during(self, runner: Any) -> Iterator[None]:
        """What the runner updates meanwhile, the optimizer counts: from where it is, should someone have set it."""
        before = runner.made
        try:
            yield
        finally:
            if ahead := runner.made - before - int(self.told.numpy()):
                self.variable.assign_add(ahead)
            self.told.assign(0)
            if runner.made > before:
                runner.loss_scale.hand_back(self._optimizer)


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
        drains_after = never if runner.keeps_flight else lambda n: self.session.drains_after(n)
        return Window(runner, minibatches, self._steps, drains_after, self._count.updates)

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


BAR, TIMES = 20, len(" 99999s 999ms/step")  # characters of Keras' bar, and of its times at most


class ProgressBar(keras.callbacks.ProgbarLogger):
    """At an epoch's end it shows those of a pipeline's figures that fit into the terminal's line; the logs have all.

    A line that is longer than the terminal's cannot be overwritten. Where the output is no terminal, all fit.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The bar's last line."""
        logs = dict(logs or {})
        figures = {name: logs.pop(name) for name in NAMES if name in logs}
        room = _columns() - _width(self.target or self.seen, logs)
        for name, value in figures.items():
            room -= len(_text(name, value))
            if room >= 0:
                logs[name] = value
        super().on_epoch_end(epoch, logs)


def _columns() -> float:
    """Characters of a line; one less than the terminal's, in which a full line would end with an empty one."""
    if not sys.stdout.isatty():
        return math.inf
    return (os.get_terminal_size(sys.stdout.fileno()).columns or math.inf) - 1  # 0 if it does not tell


def _width(steps: int, logs: dict[str, float]) -> int:
    """Characters of the bar's last line, at most."""
    return len(f"{steps}/{steps} ") + BAR + TIMES + sum(len(_text(*each)) for each in logs.items())


def _text(name: str, value: float) -> str:
    """As Keras shows it."""
    return f" - {name}: {value:.4f}" if abs(value) > 1e-3 else f" - {name}: {value:.4e}"


class FitCallback(keras.callbacks.Callback):
    """Tells the session where an epoch's data begin and how many steps it has; stops at a loss that is not finite.

    ``keras.callbacks.TerminateOnNaN`` among the user's callbacks is left to do the latter.

    Args:
        session: of this ``fit``.
    """

    def __init__(self, session: FitSession) -> None:
        super().__init__()
        self._session, self._step = session, 0
        self._stop_at_nan = not any(isinstance(each, keras.callbacks.TerminateOnNaN) for each in session.callbacks)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """The next steps read from a new iterator."""
        self._session.begin_epoch(self.params.get("steps"))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Check the loss."""
        self._step += 1
        self._session.stopped = self.model.stop_training  # Keras asks for it now, and leaves the epoch
        if self._stop_at_nan and not math.isfinite(logs["loss"]):
            raise FloatingPointError(
                f"The loss is {logs['loss']} at step {self._step}. Received: scheme={self.model.scheme!r}. "
                "Try a smaller learning rate, or clipnorm; the model keeps the weights of its last drain or snapshot."
            )

    def on_train_end(self, logs: Any = None) -> None:
        """All callbacks have seen it."""
        if self._session.at_end is not None:
            self._session.at_end()


def as_list(callbacks: Any) -> list[Any]:
    """The callbacks that ``fit`` is given, in any of the ways that Keras takes."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [each for each in keras.tree.flatten(callbacks) if each is not None]


def with_last(callbacks: Any, added: Sequence[keras.callbacks.Callback], shows_progress: bool) -> Any:
    """The same, with some more at the end, and a bar that ``shows_progress`` if there is none."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        for each in added:
            each.set_params(callbacks.params)
            each.set_model(callbacks.model)
        kinds = tuple(map(type, added))  # of an earlier ``fit``
        callbacks.callbacks[:] = [*(each for each in callbacks.callbacks if not isinstance(each, kinds)), *added]
        return callbacks
    users = as_list(callbacks)
    has_bar = any(isinstance(each, keras.callbacks.ProgbarLogger) for each in users)
    return [*users, *added, *([ProgressBar()] if shows_progress and not has_bar else [])]
