"""How far a ``fit`` is, all that it needs to go on from there, and going on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import keras

from pipetrain.engine import is_scheduled
from pipetrain.position import Position, start_at
from pipetrain.state import Arrays, array_of, check_weights, number_of


class Resumption:
    """What a callback that saves and resumes training has to do with; one for each PipelineModel.

    ``rests(n)`` says after which updates nothing may be in flight: see ``ReadAhead``. ``exits`` is what callbacks want
    done whichever way ``fit`` ends. ``callbacks`` are the user's, of the present ``fit``.

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
        self.rests: Callable[[int], bool] = _never
        self.callbacks, self._first_epoch = callbacks, first_epoch
        self._steps_done, self._metrics = 0, Arrays()

    def end(self) -> None:
        """The end of ``fit``, whichever it is."""
        self._model._initial_epoch, self.rests = None, _never
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
            "learning_rate": None if is_scheduled(optimizer) else float(array_of(optimizer.learning_rate)),
            "optimizer": type(optimizer).__name__,
            "scheme": self._model.scheme,
            "ends": layout.ends or [],
            "replicas": list(layout.replicas),
        }

    def state(self) -> Arrays:
        """All that training needs to go on as if it had not stopped, in arrays; drains.

        Weights and other state, and the optimizers' slots, by the wrapped model's variables; and the metrics.
        """
        arrays = self._engine.state()
        return arrays | {f"metric/{n}": array_of(each) for n, each in enumerate(self._model.metrics_variables)}

    def restore(self, arrays: Arrays, about: dict[str, Any], position: Position) -> list[str]:
        """Let the ``fit`` that has just begun go on from there, at this position in its data.

        Gives the optimizer's slots that are not among the arrays, and start anew. Raises ValueError for another
        model's state.
        """
        check_weights(self._engine.model, arrays)
        missing = self._engine.restore(arrays, about["ends"], about["updates"], about["fitted"])
        if about["learning_rate"] is not None and not is_scheduled(self._model.optimizer):
            self._model.optimizer.learning_rate = about["learning_rate"]
        self._model._initial_epoch, self._steps_done = position
        start_at(self.epoch_iterator, position, self._first_epoch)
        return missing

    def restore_metrics(self, arrays: Arrays) -> None:
        """Let the metrics of an epoch go on from there, as soon as they are built."""
        self._metrics = {key: arrays[key] for key in sorted(arrays, key=number_of) if key.startswith("metric/")}
        self.metrics_built()

    def metrics_built(self) -> None:
        """The metrics have their variables: a pipeline's when it sees the first results."""
        variables = self._model.metrics_variables
        if len(self._metrics) == len(variables):
            for variable, value in zip(variables, self._metrics.values(), strict=True):
                variable.assign(value)
            self._metrics = {}


def _never(updates: int) -> bool:
    return False
