"""One ``fit``, from its beginning to its end: how far it is, all that it needs to go on from there, and going on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import keras
import numpy as np

from pipetrain.checkpoint.state import (
    Arrays,
    Position,
    RunState,
    TrainingTime,
    array_of,
    check_weights,
    leave_out,
    numbered,
    start_at,
)
from pipetrain.checkpoint.store import Checkpoint
from pipetrain.compute.graph.inputs import Shapes
from pipetrain.compute.keras_private import count_of, set_initial_epoch
from pipetrain.compute.optimizer.clone import is_scheduled
from pipetrain.compute.optimizer.gradient_scaling import stepping
from pipetrain.run.window import never


class Resumable(Protocol):
    """Whoever trains, as far as a session goes on with what it has come to."""

    @property
    def model(self) -> keras.Model:
        """The wrapped model."""

    @property
    def in_flight(self) -> int:
        """How many minibatches are under way whose logs no step has had yet."""

    def about(self) -> dict[str, Any]:
        """How the model is cut and how many updates this ``fit`` has made, up to the last drain, for JSON."""

    @property
    def drains(self) -> bool:
        """Whether the state is had only by a drain, after which other weights are read than without it."""

    def state(self) -> RunState:
        """All that training needs to go on from the step at hand."""

    def restore(self, arrays: Arrays, about: dict[str, Any]) -> list[str]:
        """Go on from there; gives what is not as it was, as texts. ``about`` is what the checkpoint says of itself.

        What was in flight and cannot be gone on with is left out, see ``leave_out``, which changes ``about``.
        """


class FitSession:
    """One ``fit``, or one ``train_on_batch``: made when it begins; what callbacks want of it, they tell it.

    Attributes:
        callbacks: the user's.
        rows: those of an epoch's first minibatch, as soon as they are known.
        rows_before: those that the checkpoint names, in a run that is resumed; None if it names none.
        shapes: those of the first minibatch's inputs, if they are known before it is there.
        exact_trace: whether the trace is to have the times at which GPUs and workers had finished.
        is_traced: whether a trace is kept.
        drains_after: ``drains_after(n)`` says after which updates nothing may be in flight where the state of what is
            is not to be had: see ``Window``.
        has_checkpoints: whether the state is asked for now and then.
        at_end: called when all callbacks have seen the end of training.
        exits: what callbacks want done whichever way ``fit`` ends.
        epoch_begins: called when the next steps read from a new iterator, at most so many minibatches.
        is_lost: whether a worker is lost.
        figures: gives numbers for the logs of an epoch that has ended, beside its metrics.
        stopped: whether the epoch was left after a minibatch because a callback wanted training to stop.
        time: that training takes, without evaluations and snapshots.

    Args:
        owner: the model that ``fit`` was called of.
        trainer: what trains it.
        callbacks, rows, shapes, exact_trace, is_traced: see above.
        first_epoch: the epoch that ``fit`` would begin with.
    """

    def __init__(
        self,
        owner: keras.Model,
        trainer: Resumable,
        callbacks: list[Any],
        first_epoch: int = 0,
        rows: int | None = None,
        shapes: Shapes | None = None,
        exact_trace: bool = False,
        is_traced: bool = True,
    ) -> None:
        self._owner, self._trainer = owner, trainer
        self.callbacks, self._first_epoch = callbacks, first_epoch
        self.rows, self.rows_before, self.shapes = rows, None, shapes
        self.exact_trace, self.is_traced = exact_trace, is_traced
        self.drains_after: Callable[[int], bool] = never
        self.has_checkpoints = False
        self.at_end: Callable[[], None] | None = None
        self.exits, self.time = ExitStack(), TrainingTime()
        self.epoch_begins: Callable[[int | None], None] = lambda steps: None
        self.figures: Callable[[], Mapping[str, float]] = dict
        self.stopped = False
        self.is_lost: Callable[[], bool] = lambda: False
        self._snapshot_every = self._steps_done = self._evaluations = 0
        self._epoch_iterator: Any = None
        self._metrics: list[np.ndarray] = []
        self._logs: dict[str, float] = {}
        self._kept: Arrays | None = None
        self._begun_rate = self._epoch_rate = self._rate()
        self._rate_within: float | None = None

    def end(self) -> None:
        """The end of ``fit``, whichever it is."""
        set_initial_epoch(self._owner, None)
        self.exits.close()
        self._epoch_iterator = None  # whose threads would last as long as what refers to this

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Meanwhile Keras' loop is one of an evaluation within this ``fit``."""
        self._evaluations += 1
        try:
            with self.time.paused():
                yield
        finally:
            self._evaluations -= 1

    @property
    def is_evaluating(self) -> bool:
        """Whether what Keras' loop does is part of an evaluation."""
        return self._evaluations > 0

    def keep_snapshots(self, every_steps: int) -> None:
        """Keep the weights after every so many updates of this ``fit``. Raises ValueError if it is asked for twice."""
        if self._snapshot_every:
            raise ValueError(
                "Only one Snapshots callback can be served. Received: callbacks with two. Try one with both functions."
            )
        self._snapshot_every = every_steps

    @property
    def snapshot_every(self) -> int:
        """The updates from one snapshot to the next; 0 for none."""
        return self._snapshot_every

    def reads(self, epoch_iterator: Any) -> None:
        """Keras' loop will read its data from there."""
        self._epoch_iterator = epoch_iterator

    @property
    def in_flight(self) -> int:
        """How many minibatches are under way whose logs no step has had."""
        return self._trainer.in_flight

    @property
    def drains(self) -> bool:
        """Whether the state is had only by a drain, after which other weights are read than without it."""
        return self._trainer.drains

    @property
    def has_state(self) -> bool:
        """Whether ``state`` may be asked for after the step at hand: always after one that it ``drains_after``."""
        return not (self.drains and self.in_flight)

    def about(self) -> dict[str, Any]:
        """How the model is trained, and how far it is, in what JSON can hold."""
        optimizer = self._owner.optimizer
        return {
            "updates": int(count_of(optimizer).numpy()),
            "learning_rate": self._rate(),
            "epoch_rate": self._epoch_rate,
            "begun_rate": self._begun_rate,
            "metrics": self._metric_names(),
            "optimizer": type(optimizer).__name__,
            "scheme": self._owner.scheme,
            "options": self._owner.options,
            "way": self._owner.way,
            "batch_size": self.rows,
            **self._trainer.about(),
        }

    def state(self) -> RunState:
        """All that training needs to go on as if it had not stopped.

        Weights and other state, and the optimizers' slots, by the wrapped model's variables; the metrics; and what is
        in flight.
        """
        values, about = self._trainer.state()
        return RunState(values | (self._metric_arrays() if self._kept is None else self._kept), self.about() | about)

    def keep_metrics(self) -> None:
        """These are the metrics of an epoch that was stopped, whatever is evaluated after it."""
        if self._kept is None:
            self._kept = self._metric_arrays()

    def restore(self, found: Checkpoint, position: Position) -> list[str]:
        """Let the ``fit`` that has just begun go on from there, at this position in its data.

        Gives what optimizers and devices had gathered that is not as it was, as texts. Raises ValueError for another
        model's state.
        """
        path, arrays, about = found
        check_weights(self._trainer.model, arrays, path)
        if position.epoch < self._first_epoch:
            raise ValueError(
                f"The checkpoint is of an earlier epoch. Received: initial_epoch={self._first_epoch}, a checkpoint in "
                f"epoch {position.epoch} (the first is 0). Try the initial_epoch that it was made with."
            )
        if self._trains_otherwise(about):
            leave_out(about)
        self.rows_before = about.get("batch_size")
        changed = self._trainer.restore(arrays, about)
        if self._begun_rate is not None and about["begun_rate"] == self._begun_rate:  # else the user has set another
            self._owner.optimizer.learning_rate = about["epoch_rate"]
            self._rate_within = about["learning_rate"] if position.step else None
        epoch, self._steps_done = position
        set_initial_epoch(self._owner, epoch)
        start_at(self._epoch_iterator, position, self._first_epoch, self._owner.is_verbose)
        return changed

    def _trains_otherwise(self, about: dict[str, Any]) -> bool:
        """Whether a checkpoint's run was trained in another way, with which what was in flight is of no use."""
        mine = self.about()
        now = json.loads(json.dumps({name: mine[name] for name in ("scheme", "options", "optimizer")}))
        rows = self.rows, about.get("batch_size")
        return any(about.get(name) != each for name, each in now.items()) or (None not in rows and len({*rows}) > 1)

    def note_epoch(self) -> None:
        """An epoch is about to begin: callbacks may change its learning rate, again if it is resumed."""
        self._epoch_rate, self.stopped, self._kept = self._rate(), False, None
        self._metrics, self._logs = [], {}  # of an epoch of which nothing was left

    def begin_epoch(self, steps: int | None) -> None:
        """All callbacks have seen the epoch begin, of so many minibatches; those that are done already are left out.

        What is resumed has the rate and the metrics of its middle.
        """
        left, self._steps_done = steps and steps - self._steps_done, 0
        self.epoch_begins(left)
        if self._rate_within is not None:
            self._owner.optimizer.learning_rate, self._rate_within = self._rate_within, None
        if len(self._metrics) == len(self._owner.metrics_variables):  # not sooner: a callback may have evaluated
            self.metrics_built()

    def restore_metrics(self, arrays: Arrays, about: dict[str, Any]) -> None:
        """Let the metrics of an epoch, and its logs, go on from there: when it has begun, and they are built."""
        self._metrics = numbered(arrays, "metric")
        self._names, self._logs = about["metrics"], about["logs"]

    def metrics_built(self) -> None:
        """The metrics have their variables: a pipeline's when it sees the first results."""
        variables = self._owner.metrics_variables
        if self._metrics and len(self._metrics) == len(variables) and self._names == self._metric_names():
            for variable, value in zip(variables, self._metrics, strict=True):
                variable.assign(value)
        self._metrics = []

    @property
    def logs(self) -> dict[str, float]:
        """Those that an epoch had when it was resumed, which remain its own if none of its steps were left."""
        return self._logs

    def _rate(self) -> float | None:
        optimizer = self._owner.optimizer
        return None if is_scheduled(stepping(optimizer)) else float(array_of(optimizer.learning_rate))

    def _metric_arrays(self) -> Arrays:
        return {f"metric/{n}": array_of(each) for n, each in enumerate(self._owner.metrics_variables)}

    def _metric_names(self) -> list[str]:
        return [metric.name for metric in self._owner.metrics for _ in metric.variables]
