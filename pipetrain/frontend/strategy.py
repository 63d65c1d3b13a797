"""What a PipelineModel asks of whoever trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras
import tensorflow as tf

from pipetrain.frontend.fit_session import FitSession, Resumable
from pipetrain.frontend.planner import Planner
from pipetrain.plan.choice import Explanation
from pipetrain.schemes.options import AnyScheme
from pipetrain.trace.trace import Trace

StepFunction = Callable[[Iterator[Any]], Any]  # takes a minibatch from an iterator, and gives Keras' logs


class Strategy(Resumable, Protocol):
    """How a model is trained, from its first ``compile`` on; Keras' own loop asks for one minibatch after another.

    The order is ``keras_arguments``, ``compiled``, then for every ``fit``: ``begin``, steps, and ``finish`` or
    ``abort``. ``drain`` and ``changing`` may come at any time, and so, once drained, may ``evaluating`` and
    ``predicting``.
    """

    @property
    def trained(self) -> keras.Model:
        """The model whose variables Keras sees: the wrapped one, or a copy of it."""

    @property
    def planner(self) -> Planner:
        """What decides on the model's layout, and knows its devices."""

    @property
    def distribution(self) -> tf.distribute.Strategy:
        """TensorFlow's strategy: Keras' variables are made in its scope, and its loop takes data sets from it."""

    @property
    def optimizer(self) -> keras.optimizers.Optimizer | None:
        """The optimizer of the last ``compile``."""

    @property
    def trace(self) -> Trace:
        """What was recorded of the actions of stages, up to the last drain."""

    @property
    def readers(self) -> Sequence[str]:
        """The devices that read what ``pipetrain.data`` gives, in the order of their rows; empty if none can."""

    @property
    def staleness(self) -> Sequence[int]:
        """Of every stage, of how many updates before its own a minibatch's gradients are, once nothing waits for data.

        They are of the weights that its forward reads; a scheme that predicts these reads them moved so far ahead.
        """

    def explanation(self, batch_size: int, scheme: AnyScheme) -> Explanation:
        """A text: how the model is cut, and the estimates of every way to train it for minibatches of so many rows."""

    def keras_arguments(self, optimizer: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The optimizer and the other arguments of ``compile``, as Keras is to get them."""

    def compiled(self, owner: keras.Model, loss: Any, jit_compile: Any) -> None:
        """Keras has compiled the owner, a PipelineModel. Raises ValueError, by name, for what cannot be exact."""

    def begin(self, session: FitSession) -> None:
        """A ``fit`` begins. Raises ValueError for what it cannot train on, or with."""

    def build_metrics(self, own: Callable[[Any, Any], None], epoch_iterator: Any, batch: Any) -> None:
        """What Keras builds before its loop begins, by its ``own`` function of where the data come from, or a batch."""

    def train_function(self, own: Callable[[], StepFunction]) -> StepFunction:
        """What takes a minibatch and gives its logs; Keras' ``own``, should that serve."""

    def loss_of_part(self, loss: Any, x: Any, y_pred: Any, training: bool) -> Any:
        """What Keras' own step minimises, from the loss of inputs and predictions; unused where it makes no step."""

    def drain(self) -> None:
        """All minibatches so far are applied, and the weights in the model.

        Of an epoch that was stopped, the metrics have counted them too.
        """

    def finish(self) -> None:
        """The end of training: drains."""

    def abort(self, store: bool) -> None:
        """The end of training by an exception, at once; the weights so far are in the model if ``store``."""

    def lose(self, error: Exception) -> None:
        """From another thread, repeatedly: a worker is lost. Nobody waits for it any longer, but is given the error."""

    def changing(self) -> AbstractContextManager[None]:
        """Drained: what is changed in the wrapped model meanwhile, training goes on with."""

    def evaluating(self, owner: keras.Model, steps: int | None) -> AbstractContextManager[None]:
        """Meanwhile Keras' ``evaluate`` of the owner gives the model's results, at most ``steps`` minibatches."""

    def predicting(self, owner: keras.Model, steps: int | None) -> AbstractContextManager[None]:
        """Meanwhile Keras' ``predict`` of the owner gives the model's outputs, for at most ``steps`` minibatches."""

    def snapshots(self) -> Iterator[int]:
        """Steps of which the session wants the weights, each once; the model holds them until the next is asked for."""
