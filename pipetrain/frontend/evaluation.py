"""Runs a model forward through its stages, for ``evaluate`` and ``predict``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from pipetrain.cluster.connection import joins
from pipetrain.compute.functions.inference import Inference, trace_stages
from pipetrain.frontend.contexts import Meanwhile
from pipetrain.frontend.input_data import InputData, InputsAlone, untuned
from pipetrain.frontend.layout import Layout, inference_stages
from pipetrain.frontend.metrics import StepMetrics
from pipetrain.frontend.planner import Planner
from pipetrain.run.collector import Result
from pipetrain.run.control import RunSettings
from pipetrain.run.forward_runner import ForwardRunner, is_one_call
from pipetrain.run.pipeline import Pipeline
from pipetrain.run.window import Minibatch, Window
from pipetrain.schemes.table import INFERENCE


class Evaluator:
    """The stages in inference mode: traced once after ``compile``, with weights only while an evaluation runs.

    They are made anew where the model has other variables than they know, such as after ``quantize``. Where nothing has
    decided the cut yet, that of a profile serves, with its kernels, and training remains free to choose others.

    Args:
        planner: of the model whose weights are read, and of its stages.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner, self._model = planner, planner.chain.model
        model = self._model
        self.data, self.inputs = InputData(model), InputsAlone(model)
        self._stages: list[list[Inference]] = []
        self._functions: dict[Any, Any] = {}  # of whole minibatches, for these stages
        self._layout: Layout | None = None  # of them
        self._joins = joins()  # workers of before may have been started anew, without the stages' variables
        self._variables: list[tuple[int, bool]] = []  # of the model then, by ``id``, and whether they are penalized
        self._specs: list[Any] = []  # of the data that were evaluated since
        self._running: list[Evaluation] = []

    @contextmanager
    def running(self, steps: int | None) -> Iterator[Evaluation]:
        """An evaluation of at most ``steps`` minibatches. Whatever ends it but a lost worker, threads have ended."""
        evaluation, before = Evaluation(self, steps), self._running
        try:
            self._running = [*before, evaluation]
            yield evaluation
            evaluation.drain()
        except BaseException:
            evaluation.abort()
            raise
        finally:
            self._running = before
            evaluation.end()

    @contextmanager
    def evaluating(
        self, owner: keras.Model, steps: int | None, metrics_of: Callable[[Any], StepMetrics]
    ) -> Iterator[None]:
        """Meanwhile Keras' ``evaluate`` of the owner takes its results from stages; ``metrics_of`` targets' specs."""
        with self.running(steps) as evaluation:
            update = cache(lambda: metrics_of(evaluation.targets))  # when the first minibatch has been read

            def step(iterator: Iterator[Any]) -> Any:
                done = evaluation.step(iterator)
                return update()(*done)

            with Meanwhile(owner, test_function=step, data_reader=None):
                yield

    @contextmanager
    def predicting(self, owner: keras.Model, steps: int | None, distribution: tf.distribute.Strategy) -> Iterator[None]:
        """Meanwhile Keras' ``predict`` of the owner reads predictions, by whose ``distribution`` it would read data."""
        with self.running(steps) as evaluation:
            reader = Predicted(evaluation, distribution)
            with Meanwhile(owner, predict_function=_only, data_reader=reader):
                yield

    def drain(self) -> None:
        """What is in flight finishes, and the devices let go of the weights; evaluations go on with the model's."""
        for evaluation in self._running:
            evaluation.drain()

    def forget(self) -> None:
        """The next evaluation traces the stages anew."""
        self._stages, self._functions, self._layout = [], {}, None

    def lose(self, error: Exception) -> None:
        """From another thread: a worker is lost. Whoever waits for an evaluation is given the error."""
        for evaluation in self._running:
            evaluation.lose(error)

    def pipeline(self, data: InputData) -> Any:
        """What only runs forwards, for minibatches of these data, of which the first has been read.

        Penalties are of the weights that were trained when Keras would have traced an evaluation of such data.
        """
        planner, layout = self._planner, self._planner.layout_for_evaluation(data.shapes)
        variables = [(id(each), each.regularizer is None or each.trainable) for each in self._model.variables]
        ids, before = ([number for number, _ in each] for each in (variables, self._variables))
        is_traced = data is not self.data or data.spec in self._specs  # outputs alone have no penalties
        is_known = variables == self._variables or (ids == before and is_traced)
        if layout != self._layout or not is_known or self._joins != joins():
            self._stages = inference_stages(planner.chain, layout, lambda: planner.verbose)
            self._specs, self._functions = [], {}
            self._layout, self._variables, self._joins = layout, variables, joins()
        if data is self.data and data.spec not in self._specs:
            self._specs.append(data.spec)
        trace_stages(self._stages, None)
        if is_one_call(self._stages):
            runner: Any = ForwardRunner(self._stages, self._functions)
        else:
            runner = Pipeline(self._stages, INFERENCE, 1, lambda: RunSettings(is_traced=False))
        runner.trace_for(None)
        return runner

    def pack(self, outputs: list[Any]) -> Any:
        """The model's outputs in the structure that calling it gives."""
        return self._planner.chain.pack(outputs)


class Evaluation:
    """One pass over data; minibatches are in flight ahead of the one that is asked for.

    A result's loss is the regularization penalty alone. ``targets`` are the specs of labels and sample weights.
    """

    def __init__(self, evaluator: Evaluator, steps: int | None) -> None:
        self._evaluator, self._steps = evaluator, steps
        self._pipeline: Pipeline | None = None
        self._window: Window | None = None
        self.targets: Any = None

    def step(self, iterator: Iterator[Any]) -> tuple[Minibatch, Result]:
        """The iterator's next minibatch and its result. Raises StopIteration at the data's end."""
        if self._window is None:
            self._window = self._open(self._evaluator.data, iterator)
        return self._window.step()

    def predictions(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The model's outputs for every minibatch."""
        try:
            window = self._open(self._evaluator.inputs, iterator)
            while True:
                _, result = window.step()
                yield self._evaluator.pack(result.predictions.tensors)
        except StopIteration:
            return

    def _open(self, data: InputData, iterator: Iterator[Any]) -> Window:
        minibatches = data.open(iterator, self._steps)
        self.targets = data.targets
        self._pipeline = self._evaluator.pipeline(data)
        return Window(self._pipeline, minibatches, self._steps)

    def drain(self) -> None:
        """What is in flight finishes; the next step goes on."""
        if self._pipeline is not None:
            self._pipeline.drain()

    def abort(self) -> None:
        """Stop at once."""
        if self._pipeline is not None:
            self._pipeline.abort(store=True)

    def end(self) -> None:
        """Let go of the data: what refers to this in a circle would keep their threads until garbage is collected."""
        self._window = None

    def lose(self, error: Exception) -> None:
        """From another thread: a worker is lost."""
        if (pipeline := self._pipeline) is not None:
            pipeline.lose(error)


class Predicted:
    """In place of a data set that Keras' ``predict`` reads: the predictions for it, minibatch by minibatch.

    Keras asks the model's distribution strategy for the data set to read. Answered with this, its own loop serves,
    which reads a minibatch only when it has dealt with the one before.

    Args:
        evaluation: what makes the predictions.
        strategy: all else is left to it.
    """

    def __init__(self, evaluation: Evaluation, strategy: tf.distribute.Strategy) -> None:
        self._evaluation, self._strategy = evaluation, strategy
        self._dataset: Any = None

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Predicted:
        """Keras' data set in, predictions out."""
        self._dataset = untuned(dataset)
        return self

    def __iter__(self) -> Iterator[Any]:
        """The predictions."""
        return self._evaluation.predictions(iter(self._dataset))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def _only(batches: list[Any]) -> Any:
    (batch,) = batches
    return batch
