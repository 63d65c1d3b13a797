"""A Keras model that a strategy trains: what fit, evaluation and saving have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from pipetrain.checkpoint.session import FitSession
from pipetrain.cluster.health import HealthMonitor
from pipetrain.compute.keras_private import HookedModel
from pipetrain.frontend.attributes import Meanwhile
from pipetrain.frontend.strategy import Strategy


class StrategyModel(HookedModel):
    """Keras' loop asks it for data sets and functions, and it asks its strategy.

    ``inner`` is the model whose variables Keras sees: the wrapped one, or a copy of it. ``session`` is the ``fit`` that
    is under way, None if there is none; ``data_reader`` is what makes data sets in place of the strategy's
    distribution; ``is_verbose`` is whether work that takes long is shown.
    """

    _strategy: Strategy
    inner: keras.Model
    session: FitSession | None = None
    data_reader: Any = None
    is_verbose: bool = True
    _watch: HealthMonitor | None = None

    @property
    def model(self) -> keras.Model:
        """The wrapped model."""
        return self._strategy.model

    @property
    def distribute_strategy(self) -> Any:
        """Where Keras' loop takes its data sets from; while it predicts, predictions in place of data."""
        return self.data_reader or self._strategy.distribution

    @property
    def _session_in_loop(self) -> FitSession | None:
        """The session of the ``fit`` that Keras' loop is in, unless what it does is an evaluation within."""
        return None if self.session is None or self.session.is_evaluating else self.session

    def end_interrupted(self) -> None:
        """Forget the call that was interrupted while it let go of what it had set here."""
        for name in ("session", "data_reader", "_watch"):
            if vars(self).get(name) is not None:
                setattr(self, name, None)
        if not self.is_verbose:
            self.is_verbose = True

    @contextmanager
    def _watched(self) -> Iterator[HealthMonitor]:
        """Meanwhile workers that are lost are noticed; within itself it is the one that there is."""
        if self._watch is not None:
            yield self._watch
            return
        strategy = self._strategy
        with HealthMonitor(strategy.placement.stages_on, strategy.lose) as watch, Meanwhile(self, _watch=watch):
            yield watch

    @contextmanager
    def _saying(self, verbose: Any) -> Iterator[None]:
        """Meanwhile work that takes long is shown as ``verbose``, an argument of Keras' loop, says."""
        shown = bool(verbose)
        with Meanwhile(self, is_verbose=shown), Meanwhile(self._strategy.placement, verbose=shown):
            yield
