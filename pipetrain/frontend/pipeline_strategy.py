"""The pipeline behind a PipelineModel: feeds it Keras' data, keeps the model's weights in step with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from pipetrain.checkpoint.arrays import Arrays, assign, collected
from pipetrain.compute.functions.stage import LossFunction, Stage
from pipetrain.compute.gc_pause import gc_paused
from pipetrain.compute.graph.input_shapes import Shapes
from pipetrain.compute.keras_private import weights_of
from pipetrain.compute.optimizer.adoption import Part, adopt, forget
from pipetrain.compute.optimizer.rates import is_scheduled
from pipetrain.compute.optimizer.slots import Slot
from pipetrain.compute.optimizer.update import kinds_beside
from pipetrain.frontend import checks
from pipetrain.frontend.evaluation import Evaluator
from pipetrain.frontend.input_data import InputData
from pipetrain.frontend.placement import Placement
from pipetrain.run.collector import Result
from pipetrain.run.pipeline import Activity, Pipeline
from pipetrain.run.window import Minibatch, Window
from pipetrain.schemes.scheme import Scheme
from pipetrain.trace.trace import Trace


class PipelineStrategy:
    """Between two drains the weights live in the stages; otherwise in the model.

    Args:
        model: the model to train.
        layout: its stages.
        scheme: order of actions and choice of weights.
    """

    def __init__(self, model: keras.Model, layout: Placement, scheme: Scheme) -> None:
        self.model = self.trained = model
        self.strategy = tf.distribute.get_strategy()
        self.layout, self.microbatches = layout, layout.training.microbatches
        self._scheme = scheme
        self._pieces = self.microbatches * layout.replicas[-1]  # into which a minibatch's loss falls
        self.rows: int | None = None  # of the first minibatch, if they are known before it is there
        self.rows_done = 0  # of all minibatches whose results some step has taken
        self.evaluator = Evaluator(model, layout)
        self.optimizer: keras.optimizers.Optimizer | None = None
        self._stages: list[list[Stage]] = []
        self._weights: list[keras.Variable] = []  # all that the stages train
        self._parts: list[Part] = []  # every optimizer at work: of all replicas of all stages that have weights
        self._pipeline: Pipeline | None = None
        self._ahead: Window | None = None
        self._snapshot_every = 0
        self.counted = tf.Variable(0, dtype=tf.int64, trainable=False)  # of the updates since the last drain
        self.waits = False  # for GPUs, so that the trace has their times of completion

    def load(self) -> None:
        """Nothing to do: the stages take the model's weights when they start."""

    def adopted(self, optimizer: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The optimizer and the settings of ``compile``, as they are."""
        return optimizer, settings

    def compiled(self, optimizer: keras.optimizers.Optimizer, loss: Any, compute_loss: LossFunction) -> None:
        """The optimizer and the loss are new: stages are made anew at the next ``prepare``."""
        if optimizer is not self.optimizer:
            checks.check_own(weights_of(optimizer), self.model.variables, optimizer)
            self._stages = []
        self._loss_is_mean: bool | None = checks.loss_is_mean(loss, self._pieces)
        if self._pieces > 1 and checks.is_measured(loss):
            self._loss_is_mean = None  # seen when the first minibatch is there
        self.optimizer, self._loss, self._compute_loss = optimizer, loss, compute_loss
        self._scheduled = is_scheduled(optimizer)  # then each stage's own copy knows the rate
        self._feed = InputData(self.model, None if self._scheduled else optimizer.learning_rate.value)
        self._pipeline = None

    def pack(self, outputs: list[tf.Tensor]) -> Any:
        """The model's outputs in the structure that calling it gives."""
        return self.layout.chain.pack(outputs)

    def prepare(self, rows: int | None, shapes: Shapes | None) -> None:
        """Before training on minibatches of this many rows: make the stages, if there are none for this compilation.

        Where the cut is to be decided, and not all of the inputs' ``shapes`` are known, the first minibatch is awaited.
        """
        self.rows = rows
        self.layout.learn(shapes)
        checks.check_rows(rows, self.microbatches)
        if self._pipeline is not None and not self._pipeline.rests:
            self.abort(store=True)  # an interrupt cut an abort short
        if is_scheduled(self.optimizer) != self._scheduled:
            raise ValueError(
                "The learning rate became a schedule, or ceased to be one, after compile. Received: "
                f"learning_rate={self.optimizer._learning_rate!r}. Try compile again."
            )
        checks.check_own(weights_of(self.optimizer), self.model.variables, self.optimizer)
        if self._pipeline is not None or self.layout.can_build:
            self._start(rows or checks.DEFAULT_ROWS)

    def _start(self, rows: int) -> None:
        if self._pipeline is None:
            with gc_paused():
                self._stages = self._new_stages(rows)
                self._parts = [stage.part() for replicas in self._stages for stage in replicas if stage.variables]
                self._pipeline = Pipeline(self._stages, self._scheme, self.microbatches)
        self._begin()
        self._pipeline.first_update = self._pipeline.updates
        self._pipeline.waits = self.waits

    def _new_stages(self, rows: int) -> list[list[Stage]]:
        """Stages for this compilation; compiled again, the same optimizer keeps what it has gathered."""
        gathered = {(id(slot.weight), slot.kind): slot.variable for slot in self._slots()}
        self._weights = self.model.trainable_variables
        stages = self.layout.build(rows, self.optimizer, self._compute_loss, self._scheme)
        for slot in slots_of(stages):
            if (id(slot.weight), slot.kind) in gathered:  # else its layer was frozen
                slot.variable.assign(gathered[id(slot.weight), slot.kind])
        return stages

    def _begin(self) -> None:
        """Before the pipeline starts: what has been set in the optimizer since it was at work, the stages take over."""
        adopt(self.optimizer, self._weights, self._parts)
        updates = int(self.optimizer.iterations.numpy()) - int(self.counted.numpy())
        self._pipeline.first_update += updates - self._pipeline.updates
        self._pipeline.updates = updates

    def begin_epoch(self, steps: int | None, snapshot_every: int, rests: Callable[[int], bool]) -> None:
        """The next ``step`` reads from a new iterator, at most ``steps`` minibatches; see ``Window``."""
        self._snapshot_every = snapshot_every
        self._steps, self._ahead, self._rests = steps, None, rests

    def step(self, iterator: Iterator[Any]) -> tuple[Minibatch, Result]:
        """The next minibatch and its result; later ones are in flight. Raises StopIteration at the data's end.

        Whoever asks counts it in the optimizer's ``iterations``, and in ``counted``.
        """
        if self._pipeline is not None and self._pipeline.rests:
            self._begin()
        if self._ahead is None:
            with gc_paused():  # the stages are traced, if this is the first epoch
                self._ahead = self._read_ahead(iterator)
        minibatch, result = self._ahead.step()
        self.rows_done += minibatch.x[0].shape[0]
        return minibatch, result

    def leftovers(self) -> Iterator[tuple[Minibatch, Result]]:
        """The results of this epoch's minibatches that no step has taken."""
        if self._ahead is not None:
            yield from self._ahead.rest()

    def synchronize(self) -> None:
        """Drain: whatever is in flight finishes, and the weights flow back into the model."""
        self.evaluator.rest()
        if self._pipeline is not None:
            with self._counting():
                self._pipeline.drain()

    def finish(self) -> None:
        """The end of training."""
        self.synchronize()
        self._ahead = None

    def abort(self, store: bool) -> None:
        """Stop at once; hand the weights back if ``store``."""
        self._ahead = None
        if self._pipeline is not None:
            with self._counting():
                self._pipeline.abort(store)
            if not store:  # what is not finite is in the optimizers too
                self._pipeline, self._stages = None, []
                forget(self.optimizer)

    def snapshots(self) -> Iterator[int]:
        """Each version kept by now: the model holds its weights, and the stages rest, until the next is asked for."""
        if self._scheme.asynchronous and not self.in_flight:  # at rest: none may be left to a checkpoint's past
            self.synchronize()
        if self._pipeline is None or not self._pipeline.snapshots:
            return
        newest, rested = [tf.identity(variable.value) for variable in self.model.variables], self._pipeline.rests
        with self._pipeline.paused():
            try:
                while self._pipeline.snapshots:
                    snapshot = self._pipeline.snapshots.popleft()
                    self._pipeline.restore(snapshot)
                    yield snapshot.version
            finally:  # after a drain they are what training goes on with; an abort has handed back newer ones
                for variable, value in zip(self.model.variables, newest, strict=True):
                    if self._pipeline is not None and self._pipeline.rests == rested:
                        variable.assign(value)

    @property
    def targets(self) -> Any:
        """Specs of this epoch's labels and sample weights."""
        return self._feed.targets

    @property
    def trace(self) -> Trace:
        """What happened up to the last drain."""
        return self._pipeline.trace if self._pipeline else Trace(())

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """What the pipeline updates, the optimizer counts: from where it is, should someone have set it.

        Each step counts its own minibatch; here those are added that are ahead of the last step.
        """
        before = self._pipeline.updates
        try:
            yield
        finally:
            if ahead := self._pipeline.updates - before - int(self.counted.numpy()):
                self.optimizer.iterations.assign_add(ahead)
            self.counted.assign(0)

    def _read_ahead(self, iterator: Iterator[Any]) -> Window:
        minibatches = self._feed.open(iterator, self._steps, self._scheme.asynchronous)
        checks.check_rows(self._feed.rows, self.microbatches)
        if self._loss_is_mean is None:
            outputs = self.layout.chain.specs(len(self.layout.chain.blocks))
            self._loss_is_mean = checks.measured_mean(self._compute_loss, self._feed.targets, outputs)
        if self._pipeline is None:
            self.layout.learn(self._feed.shapes)
            self._start(self._feed.rows)
        self._pipeline.loss_is_mean, self._pipeline.snapshot_every = self._loss_is_mean, self._snapshot_every
        if self._pipeline.trace_for(self._feed.targets):
            checks.check_minimised(self._loss, [stage for stage, *_ in self._stages])
        checks.check_masks(self._pipeline.output_masks, self._loss_is_mean, self._pieces)
        return Window(self._pipeline, minibatches, self._steps, self._rests)

    def activity(self) -> Activity | None:
        """What the stages have done so far."""
        return self._pipeline.activity() if self._pipeline else None

    @property
    def in_flight(self) -> int:
        """How many minibatches are under way whose results no step has taken."""
        return self._ahead.in_flight if self._ahead else 0

    @property
    def fitted(self) -> int:
        """Updates since the start of ``fit``, up to the last drain."""
        return self._pipeline.updates - self._pipeline.first_update if self._pipeline else 0

    def state(self) -> Arrays:
        """All that training needs to go on; drains."""
        self.synchronize()
        return collected(self.model, self._slots(), self._shared())

    def beside_slots(self) -> list[str]:
        """What training needs to go on that no slot of the compiled optimizer holds."""
        stages = self.layout.stages
        rules = {self._scheme.rule(stage, stages) for stage in range(stages)}
        return sorted({kind for rule in rules for kind in kinds_beside(self.optimizer, rule)})

    def restore(
        self, arrays: Arrays, ends: Sequence[int], shapes: Shapes | None, updates: int, fitted: int
    ) -> list[str]:
        """Go on from there, after so many updates, ``fitted`` of them of this ``fit``; gives what was not there.

        ``ends`` and ``shapes`` are where that run was cut, and what its inputs were like.
        """
        self.synchronize()
        if self.layout.adopt(ends):
            self._pipeline, self._stages = None, []
        if self._pipeline is None:
            self.prepare(self.rows, self.layout.shapes or shapes)
        if self._pipeline is None:
            raise ValueError(
                "The model leaves dimensions of its inputs open, and neither the checkpoint nor the data say, before "
                f"the first minibatch, what they are. Received: stages={self.layout.stages}, a checkpoint of "
                f"{len(ends)} stages. Try partition(input_shapes=...) before fit, or as many stages."
            )
        missing = assign(self.model, arrays, self._slots(), self._shared())
        self.optimizer.iterations.assign(updates)
        self._pipeline.updates, self._pipeline.first_update = updates, updates - fitted
        return missing

    def _slots(self) -> Iterator[Slot]:
        return slots_of(self._stages)

    def _shared(self) -> Iterator[list[Any]]:
        return (part.shared for part in self._parts)


def slots_of(stages: Sequence[Sequence[Stage]]) -> Iterator[Slot]:
    """What the optimizers of all stages have gathered, by the model's own variables."""
    return (slot for replicas in stages for stage in replicas for slot in stage.slots())
