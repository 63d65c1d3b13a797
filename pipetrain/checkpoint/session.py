"""How far a ``fit`` is, all that it needs to go on from there, and going on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np

from pipetrain.checkpoint.arrays import Arrays, array_of, check_weights, numbered
from pipetrain.checkpoint.position import Position, start_at
from pipetrain.compute.keras_private import set_initial_epoch
from pipetrain.compute.optimizer.rates import is_scheduled
from pipetrain.run.window import never


class FitSession:
    """What a callback that saves and resumes training has to do with; one for each PipelineModel.

    ``rests(n)`` says after which updates nothing may be in flight: see ``Window``. ``at_end`` is called when all
    callbacks have seen the end of training, ``exits`` is what they want done whichever way ``fit`` ends. ``callbacks``
    are the user's, of the present ``fit``. ``stopped`` says whether the epoch was left after a minibatch because a
    callback wanted training to stop.

    Args:
        model: the PipelineModel.
        engine: what trains it.
    """

    def __init__(self, model: keras.Model, engine: Any) -> None:
        self._model, self._engine = model, engine
        self.exits = ExitStack()
        self.epoch_iterator: Any = None
        self.begin([], 0)

    def begin(self, callbacks: list[Any], first_epoch: int) -> None:
        """A new ``fit``."""
        self.rests: Callable[[int], bool] = never
        self.at_end: Callable[[], None] | None = None
        self.callbacks, self._first_epoch = callbacks, first_epoch
        self.stopped = False
        self._steps_done = 0
        self._metrics: list[np.ndarray] = []
        self._logs: dict[str, float] = {}
        self._kept: Arrays | None = None
        self._begun_rate = self._epoch_rate = self._rate()
        self._rate_within: float | None = None

    def end(self) -> None:
        """The end of ``fit``, whichever it is."""
        set_initial_epoch(self._model, None)
        self.rests, self.at_end, self.stopped = never, None, False
        self.exits.close()

    def steps_left(self, steps: int | None) -> int | None:
        """Of an epoch's ``steps``, those that are not done already."""
        left, self._steps_done = steps and steps - self._steps_done, 0
        return left

    @property
    def in_flight(self) -> int:
        """How many minibatches are under way whose logs no step has had yet; 0 after an update that ``rests``."""
        return self._engine.in_flight

    def about(self) -> dict[str, Any]:
        """How the model is trained, and how far it is, in what JSON can hold."""
        optimizer, layout = self._model.optimizer, self._engine.layout
        return {
            "updates": int(optimizer.iterations.numpy()),
            "fitted": self._engine.fitted,
            "learning_rate": self._rate(),
            "epoch_rate": self._epoch_rate,
            "begun_rate": self._begun_rate,
            "metrics": self._metric_names(),
            "optimizer": type(optimizer).__name__,
            "scheme": self._model.scheme,
            "options": self._model.options,
            "batch_size": self._engine.rows,
            "ends": layout.ends or [],
            "replicas": list(layout.replicas),
            "input_shapes": layout.shapes,
        }

    def state(self) -> Arrays:
        """All that training needs to go on as if it had not stopped, in arrays; drains.

        Weights and other state, and the optimizers' slots, by the wrapped model's variables; and the metrics.
        """
        arrays = self._engine.state()
        return arrays | (self._metric_arrays() if self._kept is None else self._kept)

    def keep_metrics(self) -> None:
        """These are the metrics of an epoch that was stopped, whatever is evaluated after it."""
        if self._kept is None:
            self._kept = self._metric_arrays()

    def restore(self, arrays: Arrays, about: dict[str, Any], position: Position) -> list[str]:
        """Let the ``fit`` that has just begun go on from there, at this position in its data.

        Gives the optimizer's slots that are not among the arrays, and start anew. Raises ValueError for another
        model's state.
        """
        check_weights(self._engine.model, arrays)
        if position.epoch < self._first_epoch:
            raise ValueError(
                f"The checkpoint is of an earlier epoch. Received: initial_epoch={self._first_epoch}, a checkpoint in "
                f"epoch {position.epoch} (the first is 0). Try the initial_epoch that it was made with."
            )
        shapes = about.get("input_shapes") and tuple(map(tuple, about["input_shapes"]))
        missing = self._engine.restore(arrays, about["ends"], shapes, about["updates"], about["fitted"])
        if self._begun_rate is not None and about["begun_rate"] == self._begun_rate:  # else the user has set another
            self._model.optimizer.learning_rate = about["epoch_rate"]
            self._rate_within = about["learning_rate"] if position.step else None
        epoch, self._steps_done = position
        set_initial_epoch(self._model, epoch)
        start_at(self.epoch_iterator, position, self._first_epoch)
        return missing

    def note_epoch(self) -> None:
        """An epoch is about to begin: callbacks may change its learning rate, again if it is resumed."""
        self._epoch_rate, self.stopped, self._kept = self._rate(), False, None
        self._metrics, self._logs = [], {}  # of an epoch of which nothing was left

    def epoch_begun(self) -> None:
        """All callbacks have seen the epoch begin: what is resumed has the rate and the metrics of its middle."""
        if self._rate_within is not None:
            self._model.optimizer.learning_rate, self._rate_within = self._rate_within, None
        if len(self._metrics) == len(self._model.metrics_variables):  # not sooner: a callback may have evaluated
            self.metrics_built()

    def restore_metrics(self, arrays: Arrays, about: dict[str, Any]) -> None:
        """Let the metrics of an epoch, and its logs, go on from there: when it has begun, and they are built."""
        self._metrics = numbered(arrays, "metric")
        self._names, self._logs = about["metrics"], about["logs"]

    def metrics_built(self) -> None:
        """The metrics have their variables: a pipeline's when it sees the first results."""
        variables = self._model.metrics_variables
        if self._metrics and len(self._metrics) == len(variables) and self._names == self._metric_names():
            for variable, value in zip(variables, self._metrics, strict=True):
                variable.assign(value)
        self._metrics = []

    @property
    def logs(self) -> dict[str, float]:
        """Those that an epoch had when it was resumed, which remain its own if none of its steps were left."""
        return self._logs

    def _rate(self) -> float | None:
        optimizer = getattr(self._model, "optimizer", None)  # none before compile
        return None if optimizer is None or is_scheduled(optimizer) else float(array_of(optimizer.learning_rate))

    def _metric_arrays(self) -> Arrays:
        return {f"metric/{n}": array_of(each) for n, each in enumerate(self._model.metrics_variables)}

    def _metric_names(self) -> list[str]:
        return [metric.name for metric in self._model.metrics for _ in metric.variables]
