"""``evaluate`` and ``predict``: Keras' own, which a strategy gives results and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from pipetrain.compute.keras_private import HUB_LOOP, OF_FIT, overridden
from pipetrain.frontend.keras_methods import PREDICTING
from pipetrain.frontend.preprocessing import minibatch, minibatches
from pipetrain.frontend.strategy_model import StrategyModel


class EvaluationMixin(StrategyModel):
    """Evaluation and prediction, with the weights of all minibatches so far."""

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **settings: Any,
    ) -> Any:
        """Keras' ``evaluate`` through the pipeline's stages, with the weights of all minibatches so far."""
        self.check_compile_called("evaluate")
        if not settings.get(OF_FIT):  # whose validation data have been preprocessed
            x, y, sample_weight, batch_size = minibatches(self.model, x, y, sample_weight, batch_size)
        shown = self.is_verbose if settings.get(OF_FIT) else verbose
        with self._saying(shown), self._drained(), self._strategy.evaluating(self, steps):
            return super().evaluate(
                x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict=return_dict, **settings
            )

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Keras' ``test_on_batch``: one minibatch through the pipeline's stages."""
        self.check_compile_called("test_on_batch")
        x, y, sample_weight = minibatch(self.model, x, y, sample_weight)
        with self._saying(0), self._drained(), self._strategy.evaluating(self, 1):
            return super().test_on_batch(x, y, sample_weight, return_dict)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Keras' ``predict`` through the pipeline's stages, with the weights of all minibatches so far.

        A model whose class has a ``predict_step`` of its own predicts by itself.
        """
        if overridden(self.model, PREDICTING, HUB_LOOP):
            with self._drained():
                return self.model.predict(x, batch_size, verbose, steps=steps, callbacks=callbacks)
        x, _, _, batch_size = minibatches(self.model, x, None, None, batch_size)
        with self._saying(verbose), self._drained(), self._strategy.predicting(self, steps):
            return super().predict(x, batch_size, verbose, steps, callbacks)

    def predict_on_batch(self, x: Any) -> Any:
        """The wrapped model's ``predict_on_batch``, on its own device."""
        with self._drained():
            return self.model.predict_on_batch(x)

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """All minibatches so far are done; meanwhile Keras' loop is no part of the ``fit`` that may be under way."""
        with self._watched():
            self._strategy.drain()
            with nullcontext() if self.session is None else self.session.evaluating():
                yield
