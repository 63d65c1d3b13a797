"""PipelineModel: a Keras model that trains as a pipeline of stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from pipetrain.checkpoint.session import FitSession
from pipetrain.cluster.health import HealthMonitor
from pipetrain.compute.functions.undone import undone
from pipetrain.compute.graph.input_shapes import shapes_of_data
from pipetrain.compute.optimizer.update import gathers, slots_per_weight
from pipetrain.frontend import checks
from pipetrain.frontend.data_parallel import DataParallelStrategy
from pipetrain.frontend.device_choice import resolve
from pipetrain.frontend.evaluation import Evaluation, Predicted
from pipetrain.frontend.fit_callback import FitCallback, as_list, with_last
from pipetrain.frontend.input_data import Untuned
from pipetrain.frontend.metrics import StepMetrics, TrackedMetrics, built_when_traced
from pipetrain.frontend.pipeline_strategy import PipelineStrategy
from pipetrain.frontend.placement import Placement
from pipetrain.frontend.saving import compiled_as
from pipetrain.plan.memory import Training
from pipetrain.plan.stages import Partition
from pipetrain.run.collector import Result
from pipetrain.run.pipeline import Activity
from pipetrain.run.window import Minibatch
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import DATA_PARALLEL, HORIZONS, check_name, check_options
from pipetrain.schemes.table import scheme as chosen_scheme
from pipetrain.trace.trace import Trace


def _wrapped(name: str) -> property:
    return property(lambda self: getattr(self.model, name), doc=f"The wrapped model's ``{name}``.")


class PipelineModel(keras.Model):
    """Trains a Keras model as a pipeline: stages on several devices, many minibatches in flight.

    It is a ``keras.Model``: ``compile``, ``fit``, ``evaluate``, ``predict`` and ``save`` are Keras' own, its
    weights those of the wrapped model in the same order. While a pipeline runs, each stage owns its weights; at the
    end of every epoch, and before evaluate, predict, get_weights, set_weights, save, save_weights and load_weights, it
    drains and they flow back; between these the variables of the wrapped model are out of date. ``evaluate`` and
    ``predict`` run the stages' forwards alone, with the wrapped model's results.

    Sources: SpecTrain (arXiv 1809.02839), PipeDream (arXiv 1806.03377), GPipe (arXiv 1811.06965).

    Args:
        model: a Sequential or Functional model: branches, skips, several inputs and outputs, nested models and
            shared layers included. A subclassed model called inside one is a layer that stays whole.
        stages: how many stages (the model is then profiled and cut at the first ``fit``, for inputs like those of its
            first minibatch), or a ``Partition``. By default one per device. ``single`` always uses one.
        scheme: ``single``, ``data-parallel``, ``vanilla``, ``weight-stashing``, ``vertical-sync``, ``spectrain``,
            ``spike-compensation``, ``2bw``, ``gpipe`` or ``1f1b``; or a ``pipetrain.schemes.Scheme`` of one's own.
        cuts: instead of ``stages``, the name of the last layer of every stage but the final one.
        devices: TensorFlow devices, such as ``("CPU:0", "CPU:1")``; by default those of the workers that the program
            has joined, else all logical CPU devices if there are several, else all GPUs. Fewer devices than stages:
            neighbours share.
        replicas: how many devices each stage has, such as ``(2, 1, 1)``; by default one, or those of the ``Partition``.
            Each replica takes its part of every minibatch's rows, and their gradients are summed: training is that of
            the unreplicated stage, but for BatchNormalization and Dropout, which see or draw for a replica's rows.
        microbatches: pieces per minibatch for ``gpipe``, ``1f1b`` and ``2bw``, 4 by default (for ``2bw`` at least one
            per stage, and never fewer than stages - 1); the other schemes have one.
        recompute: keep only the inputs of a stage's forward and run it again before its backward, with the same
            seeds: less memory, more time, equal results. ``vanilla`` and ``spectrain``, whose backward reads newer
            weights, then also keep the forward's.
        horizon: how ``spectrain`` predicts: ``round-trip`` as the paper has it; ``local``, up to the minibatch's own
            backward, which reads the same predicted weights (kept until then); ``fitted``, as the paper, but by that
            multiple of the velocity which, at this stage and of late, came nearest to the weights then reached.
        spike_compensation: for asynchronous schemes and SGD with momentum: a gradient that comes D updates late makes
            up for what momentum would have done with it by then. ``spike-compensation`` is ``vanilla`` with it. Source:
            Kosson et al. 2020 (arXiv 2003.11666).
        rescale_steps: for asynchronous schemes but ``2bw``: learning rates are divided by the staleness of the
            gradient, fully at first, ever less so over this many steps; where that is 1 (as it is in two stages),
            nothing changes. Source: PipeMare (arXiv 1910.05124).
        name: the model's name.

    Raises:
        ValueError, TypeError: for whatever could not be trained, before anything is.
    """

    _reader: Any = None
    _watch: HealthMonitor | None = None

    def __init__(
        self,
        model: keras.Model,
        stages: int | Partition | None = None,
        scheme: str | Scheme = "spectrain",
        *,
        cuts: Sequence[str] | None = None,
        devices: Sequence[str] | None = None,
        replicas: Sequence[int] | None = None,
        microbatches: int | None = None,
        recompute: bool = False,
        horizon: str = HORIZONS[0],
        spike_compensation: bool = False,
        rescale_steps: int | None = None,
        name: str | None = None,
    ) -> None:
        name_of_scheme = check_name(scheme)
        check_options(scheme, horizon, spike_compensation, rescale_steps)
        checks.check_microbatches(microbatches)
        checks.check_replicas(scheme, replicas)
        devices = resolve(devices)
        engine: Any
        self._chosen: Scheme | None = None
        if name_of_scheme == DATA_PARALLEL:
            layout = Placement(model, stages, cuts, devices, replicas)
            layout.training = Training("single")
            engine = DataParallelStrategy(model, layout)
        else:
            self._chosen = chosen_scheme(scheme, horizon, spike_compensation, rescale_steps)
            layout = Placement(model, stages, cuts, devices, replicas, self._chosen.schedule)
            checks.check_model(model)
            checks.check_precision(layout.chain.blocks)
            if scheme == "single":
                layout = Placement(model, 1, None, devices)
            pieces = checks.checked_pieces(microbatches, self._chosen, layout.stages)
            checks.check_schedule(self._chosen, layout.stages, pieces)
            layout.training = Training(scheme, microbatches=pieces, recompute=recompute, horizon=horizon)
            engine = PipelineStrategy(model, layout, self._chosen)
        with engine.strategy.scope():
            super().__init__(name=name or model.name)
        # Keras searches attributes for layers: ``inner`` is what it finds, the engine is nothing to it.
        self.inner, self._engine = engine.trained, engine
        self.scheme, self.snapshot_every = name_of_scheme, 0
        self.options = {"horizon": horizon, "spike_compensation": spike_compensation, "rescale_steps": rescale_steps}
        self.resumption = FitSession(self, engine)
        self._fitting, self._evaluating = False, False
        if hasattr(model, "output_names"):  # by which Keras finds each output's loss and metrics
            self.output_names = model.output_names
        self.built = True

    @property
    def model(self) -> keras.Model:
        """The wrapped model."""
        return self._engine.model

    layers, inputs, outputs = _wrapped("layers"), _wrapped("inputs"), _wrapped("outputs")
    input_shape, output_shape = _wrapped("input_shape"), _wrapped("output_shape")

    @property
    def trace(self) -> Trace:
        """What every stage did and when, and what it sent, up to the last drain; empty for ``data-parallel``.

        ``idle(trace)`` of ``pipetrain.trace.idle`` says why each stage waited. What a CPU device is given is done when
        the call returns, and so are spans and transfers, both on the sender's thread. A GPU's calls return earlier: see
        ``exact_trace``.
        """
        return self._engine.trace

    @property
    def exact_trace(self) -> bool:
        """Whether the trace has the times at which GPUs and workers had finished; False by default.

        Counts from the next ``fit``.

        Each action then waits for its GPU or its worker process, before it hands anything over and at its end, which
        takes time. Otherwise their spans are from call to return of what enqueues the work, and a transfer from another
        device may wait for the kernels that compute what is sent; the last stage goes forward and back in one call, all
        of it recorded as forward. Transfers to workers are not recorded. On CPU devices of this process the times are
        exact anyway.
        """
        return self._engine.waits

    @exact_trace.setter
    def exact_trace(self, wanted: bool) -> None:
        self._engine.waits = wanted

    def partition(self, batch_size: int = checks.DEFAULT_ROWS, input_shapes: Any = None) -> Partition:
        """How the model is cut: profiled at this batch size, if nothing has decided it yet.

        ``input_shapes`` as for ``pipetrain.profile``, where the model leaves dimensions open: by default, those of the
        first minibatch that it was trained on. Raises ValueError where nothing tells.
        """
        self._engine.layout.ask(input_shapes)
        with self._watched():
            return self._engine.layout.partition(batch_size, verbose=True)

    def explain(self, batch_size: int = checks.DEFAULT_ROWS, input_shapes: Any = None) -> str:
        """For people: how the model is cut, and what other ways to train it on these devices would come to.

        ``input_shapes`` as for ``partition``.
        """
        self._engine.layout.ask(input_shapes)
        with self._watched():
            return self._engine.layout.explanation(batch_size)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The wrapped model's forward."""
        return self.inner(inputs, training=training)

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        **settings: Any,
    ) -> None:
        """Keras' ``compile``. Raises ValueError, by name, for what a pipeline cannot do exactly.

        An optimizer's ``global_clipnorm=c`` makes every gradient ``g * min(1, c/n)``, ``n**2`` being the sum of the
        squares of all stages' gradients of a minibatch: for synchronous schemes, or one stage.
        """
        checks.check_optimizer_kind(optimizer)
        settings |= {"loss_weights": loss_weights, "metrics": metrics, "weighted_metrics": weighted_metrics}
        with self._engine.strategy.scope():
            optimizer, settings = self._engine.adopted(optimizer, settings)
            super().compile(optimizer=optimizer, loss=loss, **settings)
        self.compiled = False  # what is refused below must not be trained with
        if self.optimizer is None:
            raise ValueError("Training needs an optimizer. Received: optimizer=None. Try keras.optimizers.SGD(1e-2).")
        if self.scheme != DATA_PARALLEL:
            checks.check_loop(self.run_eagerly, self.steps_per_execution)
        checks.check_optimizer(self.optimizer, self.scheme, self._chosen, self._engine.layout.stages)
        if self._chosen is None:
            self._engine.compiled(self.optimizer)
        else:
            layout = self._engine.layout
            rule = self._chosen.rule(0, 2 * layout.stages)
            layout.training = layout.training._replace(
                slots=slots_per_weight(self.optimizer, rule),
                gathers=gathers(self.optimizer, rule, self.inner.trainable_variables),
            )
            self._scores = TrackedMetrics(self, self.inner.outputs, self._engine, self.resumption.metrics_built)
            self._engine.compiled(self.optimizer, loss, self._scores.loss)
        self.compiled = True

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        **settings: Any,
    ) -> Any:
        """Keras' ``fit``, its arguments and its History.

        The logs of a step are those of its own minibatch, though later ones are in flight.

        Raises:
            ValueError: before training, for data or settings that cannot be trained on.
            FloatingPointError: at the first loss that is not finite, naming the step; the model keeps the weights of
                its last drain or snapshot and momentum starts anew. ``keras.callbacks.TerminateOnNaN`` stops quietly.
            WorkerLost: a worker that stages are on ended, hangs or cannot be reached; the model keeps the weights of
                its last drain.
            Exception: whatever a stage raised, with a note on the stage, the action and the minibatch.
        """
        users = as_list(callbacks)
        checks.check_callbacks(users)
        with self._watched(), ExitStack() as stack:
            self._prepare("fit", x, y, batch_size)
            checks.check_backup(users, self.scheme, self._engine.beside_slots)
            self.resumption.begin(users, settings.get("initial_epoch", 0))
            stack.enter_context(self._training())
            stack.enter_context(self._with("_fitting", True))
            return super().fit(x, y, batch_size, epochs, verbose, with_last(callbacks, FitCallback(users)), **settings)

    def _prepare(self, method: str, x: Any, y: Any, batch_size: int | None) -> None:
        self._assert_compile_called(method)
        checks.check_data(x, y)
        checks.check_compiled(self.optimizer, self._engine.optimizer)
        self._engine.prepare(checks.first_rows(x, batch_size), shapes_of_data(x, self.inner))

    def make_train_function(self, force: bool = False) -> None:
        """What Keras' loop calls for every step: for a pipeline, one minibatch in and one result out."""
        if self.scheme == DATA_PARALLEL:
            super().make_train_function(force)
        else:
            self.train_function = self._train_step

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Keras' own, without reading the first batch, which would put a shuffled data set out of step."""
        if iterator is not None and not self._evaluating:
            self.resumption.epoch_iterator = iterator
        if self.scheme == DATA_PARALLEL:
            self._engine.build()
        if self.scheme == DATA_PARALLEL and iterator is not None:
            data_batch, iterator = self._engine.batch_like(iterator), None
        with undone(built_when_traced(self)):
            super()._maybe_symbolic_build(iterator, data_batch)

    def begin_epoch(self, steps: int | None) -> None:
        """The next steps read from a new iterator: ``steps`` minibatches at most, less what a resumption skips."""
        resumption = self.resumption
        self._engine.begin_epoch(resumption.steps_left(steps), self.snapshot_every, lambda n: resumption.rests(n))
        self._score: StepMetrics | None = None

    def reset_metrics(self) -> None:
        """Keras' own, which its loop calls before an epoch begins."""
        super().reset_metrics()
        if self._fitting and not self._evaluating:
            self.resumption.note_epoch()

    def get_metrics_result(self) -> Any:
        """Keras' metrics so far; of an epoch that was stopped, those of the minibatches still in flight too."""
        if tf.executing_eagerly():  # not while Keras traces a step that ends in this call
            self._engine.synchronize()
            if self.resumption.stopped and not self._evaluating:  # else every result has been or will be some step's
                return self._stopped_result()
        return super().get_metrics_result()

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Keras' own, for an epoch's end; of an epoch that was resumed and had no step left, the checkpoint's logs."""
        if not logs and self.resumption.logs and not self._evaluating:
            self._engine.synchronize()
            return self.resumption.logs
        return super()._get_metrics_result_or_logs(logs)

    def _stopped_result(self) -> Any:
        for minibatch, result in self._engine.leftovers():
            self._logged(minibatch, result, counts=False)  # the optimizer has, since they are done
        self.resumption.keep_metrics()
        return super().get_metrics_result()

    def snapshots(self) -> Iterator[int]:
        """Steps whose weights were kept, because ``snapshot_every`` divides them, and not yet given out.

        While the loop body runs the wrapped model holds that step's weights and the stages rest.
        """
        yield from self._engine.snapshots()

    @property
    def rows_done(self) -> int:
        """Rows of all minibatches whose results steps have taken, for people; 0 for ``data-parallel``."""
        return self._engine.rows_done

    def activity(self) -> Activity | None:
        """What the stages have done so far; None for ``data-parallel``."""
        return self._engine.activity()

    def _train_step(self, iterator: Iterator[Any]) -> Any:
        return self._logged(*self._engine.step(iterator))

    def _logged(self, minibatch: Minibatch, result: Result, counts: bool = True) -> Any:
        if self._score is None:
            self._score = self._scores.of_training(self._engine.targets)
        return self._score(minibatch, result, counts)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Whatever ends the loop, no thread is left and the weights are in the model, unless a worker has them."""
        try:
            with self._watched() as watch:
                try:
                    yield
                    self._engine.finish()
                except BaseException as error:
                    lost = watch.caused(error) or watch.lost is not None
                    self._engine.abort(store=not lost and not isinstance(error, FloatingPointError))
                    raise
        finally:
            self.snapshot_every = 0
            self.resumption.end()

    @contextmanager
    def _watched(self) -> Iterator[HealthMonitor]:
        """Meanwhile workers that are lost are noticed; within itself it is the one that there is."""
        if self._watch is not None:
            yield self._watch
            return
        with HealthMonitor(self._engine.layout.stages_on) as watch, self._with("_watch", watch):
            yield watch

    def train_on_batch(self, x: Any, y: Any = None, *args: Any, **settings: Any) -> Any:
        """Keras' ``train_on_batch``: one minibatch through the pipeline, which then drains."""
        if self._fitting:
            raise RuntimeError(
                "The pipeline is full of other minibatches. Received: train_on_batch within fit. Try it after fit."
            )
        with self._watched():
            self._prepare("train_on_batch", x, y, None)
            self.begin_epoch(1)
            with self._training():
                return super().train_on_batch(x, y, *args, **settings)

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
        with self._evaluation(steps):
            return super().evaluate(
                x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict=return_dict, **settings
            )

    def test_on_batch(self, x: Any, y: Any = None, *args: Any, **settings: Any) -> Any:
        """Keras' ``test_on_batch``: one minibatch through the pipeline's stages."""
        with self._evaluation(1):
            return super().test_on_batch(x, y, *args, **settings)

    @contextmanager
    def _evaluation(self, steps: int | None) -> Iterator[None]:
        """Meanwhile Keras' test function takes its results from a pipeline that only runs forwards."""
        with ExitStack() as stack:
            stack.enter_context(self._watched())
            self._engine.synchronize()
            stack.enter_context(self._with("_evaluating", True))
            if self.scheme != DATA_PARALLEL:
                evaluation = stack.enter_context(self._engine.evaluator.running(steps))
                stack.enter_context(self._with("test_function", self._test_step(evaluation)))
            yield

    @contextmanager
    def _with(self, name: str, value: Any) -> Iterator[None]:
        """Meanwhile this attribute, from which Keras' loop takes what to do, has this value."""
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def _test_step(self, evaluation: Evaluation) -> Callable[[Iterator[Any]], Any]:
        score: StepMetrics | None = None

        def step(iterator: Iterator[Any]) -> Any:
            nonlocal score
            done = evaluation.step(iterator)
            score = score or self._scores.of_testing(evaluation.targets)
            return score(*done)

        return step

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Keras' ``predict`` through the pipeline's stages, with the weights of all minibatches so far."""
        with self._prediction(steps):
            return super().predict(x, batch_size, verbose, steps, callbacks)

    def predict_on_batch(self, x: Any) -> Any:
        """The wrapped model's ``predict_on_batch``, on its own device."""
        self._engine.synchronize()
        return self.model.predict_on_batch(x)

    @contextmanager
    def _prediction(self, steps: int | None) -> Iterator[None]:
        """Meanwhile Keras reads predictions instead of data, and has nothing left to compute."""
        with ExitStack() as stack:
            stack.enter_context(self._watched())
            self._engine.synchronize()
            if self.scheme != DATA_PARALLEL:
                evaluation = stack.enter_context(self._engine.evaluator.running(steps))
                stack.enter_context(self._with("_reader", Predicted(evaluation)))
                stack.enter_context(self._with("predict_function", _only))
            yield

    @property
    def distribute_strategy(self) -> Any:
        """Keras' own, or what reads data in its place: while ``predict`` makes its data set, predictions of it."""
        reader, self._reader = self._reader, None  # for one data set: a callback may evaluate on another
        strategy = super().distribute_strategy
        return reader or (strategy if self.scheme == DATA_PARALLEL else Untuned(strategy))

    def get_weights(self) -> Any:
        """The wrapped model's weights, all minibatches so far applied."""
        self._engine.synchronize()
        return self.model.get_weights()

    def set_weights(self, weights: Any) -> None:
        """Set the wrapped model's weights, in its order."""
        self._engine.synchronize()
        self.model.set_weights(weights)
        self._engine.load()

    def save(self, filepath: Any, *args: Any, **settings: Any) -> None:
        """Save the wrapped model, compiled as this one is: an ordinary Keras file, which needs no pipetrain to load."""
        with self._as_one() as model:
            model.save(filepath, *args, **settings)

    def save_weights(self, filepath: Any, *args: Any, **settings: Any) -> None:
        """Save the wrapped model's weights and the optimizer's slots, as Keras' own ``save_weights`` does."""
        with self._as_one() as model:
            model.save_weights(filepath, *args, **settings)

    def load_weights(self, filepath: Any, *args: Any, **settings: Any) -> None:
        """Load the wrapped model's weights, and the optimizer's slots if it is built, as Keras' own does."""
        with self._as_one() as model:
            model.load_weights(filepath, *args, **settings)
        self._engine.load()

    def get_state_tree(self, *args: Any, **settings: Any) -> Any:
        """Keras' ``get_state_tree`` of the wrapped model, compiled as this one is."""
        with self._as_one() as model:
            return model.get_state_tree(*args, **settings)

    def set_state_tree(self, state_tree: Any) -> None:
        """Keras' ``set_state_tree`` of the wrapped model, compiled as this one is."""
        with self._as_one() as model:
            model.set_state_tree(state_tree)
        self._engine.load()

    @contextmanager
    def _as_one(self) -> Iterator[keras.Model]:
        """The wrapped model with all weights, compiled meanwhile as this one is: for Keras, one that trained."""
        self._engine.synchronize()
        with compiled_as(self.model, self) as model, self._engine.strategy.scope():
            yield model

    def compile_from_config(self, config: Any) -> None:
        """``compile`` as another model was, by what its ``get_compile_config`` gives."""
        self.compile(**keras.saving.deserialize_keras_object(config))

    def get_config(self) -> Any:
        """Raises ValueError: stages and devices are this process's, and no model can be made of a description."""
        raise ValueError(
            "A PipelineModel cannot be copied, pickled or described, as its stages are on this process's devices. "
            f"Received: {self.name!r}. Try save(path) and keras.models.load_model, then PipelineModel again; or .model."
        )

    def summary(self, *args: Any, **settings: Any) -> None:
        """The wrapped model's summary."""
        self.model.summary(*args, **settings)


def _only(batches: list[Any]) -> Any:
    (batch,) = batches
    return batch
