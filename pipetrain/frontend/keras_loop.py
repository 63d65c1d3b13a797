"""Keras' own loop, whose steps a strategy takes: ``fit``, ``train_on_batch``, ``evaluate`` and ``predict``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from pipetrain.cluster.health import HealthMonitor, WorkerLost
from pipetrain.compute.graph.inputs import shapes_of_data
from pipetrain.compute.keras_private import (
    HUB_LOOP,
    OF_FIT,
    built_when_traced,
    end_without_waiting,
    overridden,
    replace_layer,
)
from pipetrain.compute.optimizer.gradient_scaling import stepping
from pipetrain.frontend.auto import AutoStrategy
from pipetrain.frontend.contexts import Meanwhile, known, undone
from pipetrain.frontend.fit_session import FitSession
from pipetrain.frontend.input_data import check_data, first_rows, fit_arguments, minibatch, minibatches
from pipetrain.frontend.options import Options, checked
from pipetrain.frontend.refusals import check_callbacks, check_compiled
from pipetrain.frontend.runner_fit import FitCallback, as_list, with_last
from pipetrain.frontend.status_page import asked_for
from pipetrain.frontend.strategies import strategy_of
from pipetrain.frontend.strategy import StepFunction
from pipetrain.frontend.worker_data import (
    WorkerData,
    WorkerDatasets,
    check_not_by_workers,
    check_readers,
    check_worker_data,
)
from pipetrain.frontend.wrapped_model import PREDICTING, WrappedModel
from pipetrain.plan.choice import Choice
from pipetrain.schemes.options import AnyScheme


class KerasLoop(WrappedModel):
    """Each call of Keras' loop that concerns training goes to the strategy, or to the session of this ``fit``.

    Attributes:
        session: the ``fit`` that is under way, None if there is none.
        worker_datasets: what workers read in this ``fit``, None if they read nothing.
        data_reader: what makes data sets in place of the strategy's distribution.
        is_verbose: whether work that takes long is shown.
        way: the arguments of ``PipelineModel`` that ``scheme="auto"`` has chosen: the scheme's name, its options and
            the others, each by its name; None before, and for other schemes.
    """

    session: FitSession | None = None
    worker_datasets: WorkerDatasets | None = None
    data_reader: Any = None
    is_verbose: bool = True
    way: Mapping[str, Any] | None = None
    exact_trace: bool
    is_traced: bool
    scheme: str
    options: dict[str, Any]
    _watch: HealthMonitor | None = None
    _compile_again: partial[None] | None = None
    _choice: Choice | None = None
    _chosen_scheme: AnyScheme
    _by: Callable[[keras.Model, Options], KerasLoop]  # a model that is trained by these options

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """Keras' ``fit``, its arguments and its History; what the wrapped model preprocesses is preprocessed.

        The logs of a step are those of its own minibatch, though later ones are in flight.

        Raises:
            ValueError: before training, for data or settings that cannot be trained on.
            FloatingPointError: at the first loss that is not finite, naming the step; the model keeps the weights of
                its last drain or snapshot and momentum starts anew. ``keras.callbacks.TerminateOnNaN`` stops quietly.
            WorkerLost: a worker that stages are on ended, hangs or cannot be reached; the model keeps the weights of
                its last drain.
            Exception: whatever a stage raised, with a note on the stage, the action and the minibatch.
        """
        self.check_no_session("fit")
        users = as_list(callbacks)
        data = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size, "shuffle": shuffle}
        data |= {"validation_split": validation_split, "validation_data": validation_data}
        data |= {"validation_batch_size": validation_batch_size}
        loop = {"epochs": epochs, "verbose": verbose, "initial_epoch": initial_epoch, "class_weight": class_weight}
        loop |= {"steps_per_epoch": steps_per_epoch, "validation_steps": validation_steps}
        check_worker_data(self.model, data)
        given = fit_arguments(self.model, data)
        with self._read_by_workers(given, loop):
            read = given["x"], given["y"], given["batch_size"]
            with self._training("fit", *read, users, initial_epoch, verbose) as session:
                added = [*asked_for(users), FitCallback(session)]
                callbacks = with_last(callbacks, added, shows_progress=verbose != 0)
                return super().fit(callbacks=callbacks, validation_freq=validation_freq, **loop, **given)

    @contextmanager
    def _read_by_workers(self, given: dict[str, Any], loop: dict[str, Any]) -> Iterator[None]:
        """Arguments of Keras' ``fit`` for data that workers read, on whose hosts the datasets are meanwhile."""
        if not isinstance(given["x"], WorkerData):
            yield
            return
        self.check_compile_called("fit")
        check_readers(self._strategy.readers, self.scheme)
        with self._watched():
            datasets = given["x"].on(self._strategy.readers, loop["class_weight"])
            datasets.check_steps(loop["steps_per_epoch"])
            given["x"], loop["class_weight"] = datasets.described, None
            with Meanwhile(self, worker_datasets=datasets):
                yield

    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Keras' ``train_on_batch``: one minibatch through the pipeline, which then drains."""
        self.check_no_session("train_on_batch")
        check_not_by_workers("train_on_batch", x)
        x, y, sample_weight = minibatch(self.model, x, y, sample_weight)
        with self._training("train_on_batch", x, y, None, verbose=0) as session:
            session.begin_epoch(1)
            return super().train_on_batch(x, y, sample_weight, class_weight, return_dict)

    def check_no_session(self, method: str) -> None:
        """Raise RuntimeError within ``fit``, whose minibatches are in flight."""
        if self.session is not None:
            raise RuntimeError(
                f"The pipeline is full of other minibatches. Received: {method} within fit. Try it after fit."
            )

    @contextmanager
    def _training(
        self,
        method: str,
        x: Any,
        y: Any,
        batch_size: int | None,
        users: Any = (),
        first_epoch: int = 0,
        verbose: Any = "auto",
    ) -> Iterator[FitSession]:
        """A session. Whatever ends it, the weights are in the model and threads have ended, unless a worker is lost."""
        self.check_compile_called(method)
        check_data(x, y)
        with self._saying(verbose), self._watched():
            self._settle(x, y, batch_size, users)
        with self._saying(verbose), self._watched() as watch:
            session = self._begin(x, batch_size, users, first_epoch)
            session.is_lost = lambda: watch.lost is not None
            try:
                self.session = session
                with Meanwhile(self, data_reader=None):
                    yield session
                    self._strategy.finish()
            except BaseException as error:
                lost = watch.caused(error) or watch.lost is not None
                with nullcontext() if isinstance(error, Exception) else suppress(WorkerLost):  # an interrupt goes first
                    self._strategy.abort(store=not lost and not isinstance(error, FloatingPointError))
                raise
            finally:
                self.session = None
                session.end()

    def _settle(self, x: Any, y: Any, batch_size: int | None, callbacks: Sequence[Any]) -> None:
        """Choose the way to train if it is open: a strategy of that way takes the place of the one that chose it."""
        auto = self._strategy
        if not isinstance(auto, AutoStrategy):
            return
        again = known(self._compile_again)
        taken = auto.taken(x, y, batch_size, callbacks, partial(self._by, self.model), again.keywords)
        options = checked(auto.options_of(taken.way, taken.cut))
        strategy = self._strategy = strategy_of(self.model, options, auto.given)
        replace_layer(self, "inner", strategy.trained)
        self.scheme, self.options, self._chosen_scheme = options.name, options.policy, options.scheme
        self._choice, self.way = taken.choice, auto.way_told(taken, options, strategy.planner.layout)
        again()

    def _begin(self, x: Any, batch_size: int | None, users: Any, first_epoch: int) -> FitSession:
        check_compiled(self.optimizer, self._strategy.optimizer)
        check_callbacks(users, stepping(self.optimizer))
        rows, shapes = first_rows(x, batch_size), shapes_of_data(x, self._strategy.trained)
        traces = self.exact_trace, self.is_traced
        session = FitSession(self, self._strategy, users, first_epoch, rows, shapes, *traces)
        self._strategy.begin(session)
        return session

    def make_train_function(self, force: bool = False) -> None:
        """What Keras' loop calls for every step: the strategy's function."""

        def own() -> StepFunction:
            super(KerasLoop, self).make_train_function(force)
            return self.train_function

        self.train_function = self._strategy.train_function(own)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Keras' own; on each of several devices where Keras' step runs there, of its part of the rows."""
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return self._strategy.loss_of_part(loss, x, y_pred, training)

    def build_before_loop(self, own: Callable[..., None], iterator: Any, data_batch: Any) -> None:
        """Keras' own, without reading the first batch, which would put a shuffled data set out of step."""
        if iterator is not None and self._watch is not None and self._watch.watches:
            end_without_waiting(iterator)
        if iterator is not None and self._session_in_loop is not None:
            self._session_in_loop.reads(iterator)
        with undone(built_when_traced(self)):
            self._strategy.build_metrics(own, iterator, data_batch)

    def reset_metrics(self) -> None:
        """Keras' own, which its loop calls before an epoch begins."""
        with self._compiled_within() as model:
            model.reset_metrics()
        if self._session_in_loop is not None:
            self._session_in_loop.note_epoch()

    def get_metrics_result(self) -> Any:
        """Keras' metrics so far; of an epoch that was stopped, those of the minibatches still in flight too."""
        if tf.executing_eagerly():  # not while Keras traces a step that ends in this call
            self._strategy.drain()
            if self._session_in_loop is not None and self._session_in_loop.stopped:
                self._session_in_loop.keep_metrics()
        with self._compiled_within() as model:
            return model.get_metrics_result()

    def logs_of_epoch(self, own: Callable[[Any], Any], logs: Any) -> Any:
        """Keras' own, for an epoch's end, and the strategy's figures of it.

        Of an epoch that was resumed and had no step left, the checkpoint's logs.
        """
        session = self._session_in_loop
        if not logs and session is not None and session.logs:
            self._strategy.drain()
            return session.logs
        found = own(logs)
        if session is None or session.is_evaluating:
            return found
        return {**found, **session.figures()}

    def snapshots(self) -> Iterator[int]:
        """Steps whose weights were kept for the session's ``keep_snapshots``, and not yet given out.

        While the loop body runs the wrapped model holds that step's weights and the stages rest.
        """
        with nullcontext() if self.session is None else self.session.time.paused():
            yield from self._strategy.snapshots()

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
        check_not_by_workers("evaluate", x)
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
        check_not_by_workers("predict", x)
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
        for name in ("session", "worker_datasets", "data_reader", "_watch"):
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
        stages_on = self._strategy.planner.layout.stages_on
        if isinstance(self._strategy, AutoStrategy):  # what it tries may be on any of them
            stages_on = {each: [] for each in self._strategy.devices} | stages_on
        with HealthMonitor(stages_on, self._lose) as watch, Meanwhile(self, _watch=watch):
            yield watch

    def _lose(self, error: Exception) -> None:
        """From another thread, repeatedly: a worker is lost. Nobody waits for it any longer, but is given the error."""
        if (datasets := self.worker_datasets) is not None:
            datasets.lost.told(error)
        self._strategy.lose(error)

    @contextmanager
    def _saying(self, verbose: Any) -> Iterator[None]:
        """Meanwhile work that takes long is shown as ``verbose``, an argument of Keras' loop, says."""
        shown = bool(verbose)
        with Meanwhile(self, is_verbose=shown), Meanwhile(self._strategy.planner, verbose=shown):
            yield
