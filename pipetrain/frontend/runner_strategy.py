"""Training by a runner of stages: feeds it Keras' data, and keeps the model's weights in step with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import tensorflow as tf

from pipetrain.checkpoint.state import (
    OF_DEVICE,
    Arrays,
    RunState,
    assign_gathered,
    assign_model,
    assign_scale,
    collected,
    leave_out,
    scale_arrays,
)
from pipetrain.compute.functions.kernels import gc_paused
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.graph.inputs import Shapes, beside
from pipetrain.compute.keras_private import count_of, supports_xla
from pipetrain.compute.optimizer.clone import with_known_momentum
from pipetrain.compute.optimizer.gradient_scaling import LossScale, stepping
from pipetrain.compute.optimizer.slots import forget
from pipetrain.compute.optimizer.update import kinds_beside
from pipetrain.frontend.compilation import Compilation, trained_in
from pipetrain.frontend.contexts import VariableWatch, known
from pipetrain.frontend.evaluation import Evaluator
from pipetrain.frontend.fit_session import FitSession
from pipetrain.frontend.flight import FlightConditions, kept_of, state_of
from pipetrain.frontend.input_data import Untuned, check_rows
from pipetrain.frontend.layout import KeptLayout, OptimizedStages
from pipetrain.frontend.planner import Planner
from pipetrain.frontend.refusals import check_backup, checked_steps
from pipetrain.frontend.runner_fit import RunnerFit, UpdateCount, handed_out
from pipetrain.frontend.strategy import StepFunction
from pipetrain.logs import BELOW_BAR
from pipetrain.plan.choice import Explanation
from pipetrain.run.collector import Kept
from pipetrain.run.control import LostWorker, RunSettings
from pipetrain.schemes.options import AnyScheme
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.weight_versions import steady_staleness
from pipetrain.trace.trace import Trace

_logger = logging.getLogger(__name__)
OTHER_RUNNER = (
    "Minibatches were in flight when the checkpoint was made, in functions over all devices; this run has a thread for "
    "each device, and leaves out the updates that they had not made yet. Some may be trained on twice."
)


class RunnerStrategy:
    """A ``Strategy`` of stages. Between two drains the weights live in the stages; otherwise in the model.

    A subclass says what its stages are (``_built``) and what runs them (``_new_runner``).

    Args:
        planner: of the model, which decides on its layout.
        scheme: order of actions and choice of weights.
    """

    def __init__(self, planner: Planner, scheme: Scheme) -> None:
        self.model = self.trained = planner.chain.model
        self.planner, self.microbatches = planner, planner.training.microbatches
        self.distribution = Untuned(tf.distribute.get_strategy())
        self.evaluator = Evaluator(planner)
        self._scheme = self._chosen = scheme  # ``compile`` may make another of what is chosen
        self._last_compilation: Compilation | None = None
        self._steps: int | None = None  # minibatches of a call, if that is asked
        self._stages = OptimizedStages()
        self._runner: Any = None
        self._made_for_rows = 0  # of the runner; 0 where that is not known
        self._made_as: list[tuple[str, bool]] = []  # what was trainable then
        self._fit: RunnerFit | None = None
        self._away = VariableWatch(self.drain)  # of what the stages have newer values than the model
        self._count = UpdateCount()
        self._goes_on: Kept | None = None  # what devices held in the run that the next minibatch goes on with
        self._lost = LostWorker()  # for calls to workers that no runner makes

    @property
    def optimizer(self) -> keras.optimizers.Optimizer | None:
        """The compiled optimizer."""
        return self._last_compilation.optimizer if self._last_compilation else None

    @property
    def _compilation(self) -> Compilation:
        return known(self._last_compilation)

    @property
    def readers(self) -> Sequence[str]:
        """None: this process reads minibatches, and sends them."""
        return ()

    @property
    def staleness(self) -> Sequence[int]:
        """By the schedule, of a minibatch that finds the stages full."""
        stages = self.planner.layout.stages
        return [steady_staleness(self._scheme, stage, stages, self.microbatches) for stage in range(stages)]

    def explanation(self, batch_size: int, scheme: AnyScheme) -> Explanation:
        """A text: how the model is cut, and the estimates of other ways to train it."""
        return self.planner.explanation(batch_size, scheme)

    def keras_arguments(self, optimizer: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The optimizer and the other arguments of ``compile``, but for how many minibatches a call has.

        That is the runner's matter: Keras' loop gives minibatches one by one, and callbacks see each.
        """
        others = dict(settings)
        self._steps = checked_steps(others.pop("steps_per_execution", None))
        return optimizer, others

    def compiled(self, owner: keras.Model, loss: Any, jit_compile: Any) -> None:
        """The optimizer and the loss are new: stages are made anew when the next ``fit`` begins."""
        planner, scheme = self.planner, with_known_momentum(self._chosen, stepping(owner.optimizer))
        compilation = Compilation(owner, loss, scheme, planner, self._count.told, self._metrics_built)
        training = planner.training._replace(
            slots=compilation.slots,
            gathers=compilation.gathers,
            temporaries=compilation.temporaries,
            jit_compile=supports_xla(self.model) and jit_compile,
        )
        planner.learn_training(training, compilation.steps)
        if self._last_compilation is None or compilation.steps is not self._last_compilation.steps:
            self._stages = OptimizedStages()
        self._last_compilation, self._runner, self._scheme = compilation, None, scheme
        self._count.learn_optimizer(compilation.optimizer)
        self.evaluator.forget()

    def _metrics_built(self) -> None:
        if self._fit is not None:
            self._fit.session.metrics_built()

    def begin(self, session: FitSession) -> None:
        """A ``fit`` begins: make the stages, if there are none for this compilation.

        Where the cut is to be decided, and not all of the inputs' shapes are known, the first minibatch is awaited.
        """
        self._lost = LostWorker(self.planner.layout.devices)
        self._prepare(session.rows, session.shapes)
        check_backup(session.callbacks, self._scheme.name, self._kinds_beside)
        self._goes_on = None
        fit = RunnerFit(session, self._compilation, self._runner_for_data, self._count, self._reads_ahead)
        self._fit = fit
        session.exits.callback(fit.end)
        self._count.set_fitted(0, self._runner)
        session.epoch_begins, session.figures = fit.begin_epoch, fit.figures

    @property
    def _reads_ahead(self) -> bool:
        """Whether minibatches are read ahead of their turn."""
        return self._scheme.asynchronous

    def _prepare(self, rows: int | None, shapes: Shapes | None) -> None:
        self.planner.learn_shapes(shapes)
        check_rows(rows, self.microbatches)
        if self._runner is not None and self._runner.is_lost:
            self._forget()  # a worker was lost when all steps had been made
        if self._runner is not None and not self._runner.is_drained:
            self.abort(store=True)  # an interrupt cut an abort short
        self._compilation.check()
        if self.microbatches > 1 and self._made_for_rows and (rows or self._made_for_rows + 1) > self._made_for_rows:
            self._runner = None  # what its stages keep of a minibatch was decided for fewer rows
        if self._runner is None and self.planner.can_decide:
            self._make_runner(rows)
        if self._runner is not None:
            self._lost.unless_lost(lambda: self._stages.adopt_from(self.optimizer))

    def _make_runner(self, rows: int | None) -> None:
        """Make the stages for this compilation; compiled again, the same optimizer keeps what it has gathered."""
        self._compilation.check_trained()
        self._made_as = trained_in(self.model)
        self._decide(rows)
        with gc_paused():
            self._made_for_rows = rows or 0
            self._stages = self._lost.unless_lost(lambda: self._new_stages(rows))
            self._runner = self._new_runner()

    def _new_stages(self, rows: int | None) -> OptimizedStages:
        stages = OptimizedStages(self._built(rows), self.model.trainable_variables)
        stages.go_on_from(self._stages)
        return stages

    def _decide(self, rows: int | None) -> None:
        """What a profile or measured links decide before there are stages: an interrupt ends it at once."""

    def _built(self, rows: int | None) -> Sequence[list[Stage]]:
        """Every stage's replicas, for minibatches of so many rows if that is known."""
        raise NotImplementedError

    def _new_runner(self) -> Any:
        """What runs the stages."""
        raise NotImplementedError

    def _traced(self, runner: Any) -> Any:
        """What runs the stages once they have been traced."""
        return runner

    def _run_settings(self) -> RunSettings:
        """Asked when the weights are taken from the model."""
        self._stages.adopt_from(self._compilation.optimizer)
        session, kept = known(self._fit).session, self._goes_on
        self._goes_on = None
        if kept is not None and not self._runner.keeps_flight:
            _logger.warning(OTHER_RUNNER, extra=BELOW_BAR)
            kept = None
        if kept is not None:
            self._count.go_on(kept.taken)
        return RunSettings(
            updates=self._count.steps,
            loss_scale=LossScale.of(self._compilation.optimizer),
            steps=self._count.fitted(self._runner),
            snapshot_every=session.snapshot_every,
            loss_is_mean=self._compilation.loss_is_mean,
            exact_times=session.exact_trace,
            is_traced=session.is_traced,
            kept=kept,
            minibatches=self._count.updates,
        )

    def build_metrics(self, own: Callable[[Any, Any], None], epoch_iterator: Any, batch: Any) -> None:
        """Keras' own, which without a distribution strategy leaves it to the first results: no data are read."""
        own(epoch_iterator, batch)

    def train_function(self, own: Callable[[], StepFunction]) -> StepFunction:
        """One minibatch in and one result out; what callbacks then do with the model's variables is noticed."""
        return self._step

    def _step(self, iterator: Iterator[Any]) -> Any:
        self._away.rest()
        logs = known(self._fit).step(iterator)
        if not known(self._runner).is_drained:
            self._away.begin(self._held, [self._count.variable])
        return logs

    def _held(self) -> Iterator[Any]:
        """All variables of model and optimizer of which the stages have newer values, or that they are changing."""
        yield from self.model.variables
        yield from beside(self.model)
        yield from (slot.variable for slot in self._stages.slots())
        yield from (variable for shared in self._stages.shared() for variable in shared)
        if self._compilation.steps is not self._compilation.optimizer:
            yield count_of(self._compilation.steps)  # which knows only after a drain which steps were skipped

    def loss_of_part(self, loss: Any, x: Any, y_pred: Any, training: bool) -> Any:
        """The loss itself: nobody has a part of the rows."""
        return loss

    def _runner_for_data(self) -> Any:
        """The runner, when the first minibatch has been read: all that has waited for it is made."""
        data, session = self._compilation.data, known(self._fit).session
        # What a resumed run reads first may be the last minibatch of an epoch, which may have fewer rows.
        session.rows = session.rows or max(data.rows, session.rows_before or 0)
        check_rows(session.rows, self.microbatches)
        self._compilation.measure_loss()
        is_new = self._runner is not None and self._runner.traced_for != data.targets
        self._compilation.check_trained(is_new)
        if is_new and self._made_as != trained_in(self.model):
            self._runner = None  # a callback has changed it before the first minibatch
        if self._runner is None:
            self.planner.learn_shapes(data.shapes)
            self._make_runner(session.rows)
            check_backup(session.callbacks, self._scheme.name, self._kinds_beside)
        pipeline = known(self._runner)
        if pipeline.trace_for(data.targets):
            self._compilation.check_traced(self._stages.first)
            self._stages.traced()
            self._runner = pipeline = self._traced(pipeline)
        self._compilation.traced()
        self._compilation.check_masks(pipeline.output_masks)
        return pipeline

    def drain(self) -> None:
        """Whatever is in flight finishes, and the weights flow back into the model.

        Of an epoch that was stopped, the metrics count the minibatches that no step takes any more.
        """
        self.evaluator.drain()
        self._away.end()
        if self._runner is not None:
            with self._count.during(self._runner):
                self._runner.drain()
        if self._fit is not None:
            self._fit.count_stopped()

    def finish(self) -> None:
        """The end of training."""
        self.drain()
        self._fit = None

    def abort(self, store: bool) -> None:
        """Stop at once; hand the weights back if ``store``."""
        self._away.end()
        self._fit = None
        if self._runner is not None:
            try:
                with self._count.during(self._runner):
                    self._runner.abort(store)
            except ConnectionError:  # a worker was lost meanwhile
                self._forget()
                raise
            if not store:  # what is not finite is in the optimizers too
                self._forget()

    def _forget(self) -> None:
        """Nothing is left of the stages and their optimizers."""
        self._runner, self._stages = None, OptimizedStages()
        forget(self._compilation.steps)

    def lose(self, error: Exception) -> None:
        """From another thread, repeatedly: a worker is lost. Nobody waits for it any longer, but is given the error."""
        self._lost.told(error)
        self.evaluator.lose(error)
        if (pipeline := self._runner) is not None:
            pipeline.lose(error)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Drained: the stages take the model's weights when they start again."""
        self.drain()
        yield

    def evaluating(self, owner: keras.Model, steps: int | None) -> AbstractContextManager[None]:
        """Meanwhile Keras' ``evaluate`` of the owner takes its results from a pipeline that only runs forwards."""
        return self.evaluator.evaluating(owner, steps, lambda targets: self._compilation.metrics.of_testing(targets))

    def predicting(self, owner: keras.Model, steps: int | None) -> AbstractContextManager[None]:
        """Meanwhile Keras' ``predict`` of the owner reads predictions instead of data, and computes nothing."""
        return self.evaluator.predicting(owner, steps, self.distribution)

    def snapshots(self) -> Iterator[int]:
        """Each version kept by now; see ``handed_out``."""
        if self._scheme.asynchronous and not self.in_flight:  # at rest: none may be left to a checkpoint's past
            self.drain()
        if self._runner is not None:
            with self._away.resting():
                yield from handed_out(self._runner, self.model)

    @property
    def trace(self) -> Trace:
        """What happened up to the last drain."""
        return self._runner.trace if self._runner else Trace(())

    @property
    def in_flight(self) -> int:
        """How many minibatches are under way whose results no step has taken."""
        return self._fit.in_flight if self._fit else 0

    def about(self) -> dict[str, Any]:
        """How the model is cut, and how many updates this ``fit`` has made that its steps know of."""
        fitted = self._count.fitted(self._runner) + int(self._count.told.numpy())
        return {"fitted": fitted, **self.planner.about()}

    @property
    def drains(self) -> bool:
        """Whether minibatches are in flight of which only the runner's threads know."""
        return self._scheme.asynchronous and not known(self._runner).keeps_flight

    def state(self) -> RunState:
        """All that training needs to go on; of a runner that does not know what is in flight, it is had by a drain."""
        runner, optimizer = self._runner, self._compilation.optimizer
        if runner is None or runner.is_drained or not runner.keeps_flight:
            self.drain()
            values = self._collected()
            return RunState(values | scale_arrays(optimizer), {})
        with self._away.resting():
            way, devices = self._way(), self.planner.layout.devices
            values, about = self._lost.unless_lost(
                lambda: state_of(self.model, self._stages, runner.kept(), way, devices)
            )
            return RunState(values | scale_arrays(optimizer, runner.scale), about)

    def _way(self) -> FlightConditions:
        """By what a run goes on with what is in flight."""
        layout, scheme = self.planner.layout, self._scheme
        kinds = (tf.DeviceSpec.from_string(each).device_type or "" for each in layout.devices)
        recompute = self.planner.training.recompute
        cut = layout.ends or (), layout.replicas, layout.compiled or (), tuple(kinds)
        crossing, summed = (each and str(each) for each in (scheme.compression, scheme.replica_compression))
        return FlightConditions(scheme.name, *cut, self.microbatches, recompute, crossing or None, summed or None)

    def _kinds_beside(self) -> list[str]:
        """What training needs to go on that no slot of the compiled optimizer holds."""
        stages = self.planner.layout.stages
        rules = {self._scheme.rule(stage, stages, self.microbatches) for stage in range(stages)}
        replicas = (replica for stage in self._stages.replicas for replica in stage)
        kept = {OF_DEVICE.sub("", slot.kind) for replica in replicas for slot in replica.worker_slots}
        return sorted({kind for rule in rules for kind in kinds_beside(self._compilation.steps, rule)} | kept)

    def restore(self, arrays: Arrays, about: dict[str, Any]) -> list[str]:
        """Go on from there; gives what is not as it was, see ``assign_gathered``."""
        kept = KeptLayout.of(about)
        self.drain()
        if self.planner.adopt(kept):
            self._runner, self._stages = None, OptimizedStages()
        if self._runner is None:
            self._prepare(known(self._fit).session.rows, self.planner.shapes or kept.shapes)
        if self._runner is None:
            raise ValueError(
                "The model leaves dimensions of its inputs open, and neither the checkpoint nor the data say, before "
                f"the first minibatch, what they are. Received: stages={self.planner.layout.stages}, a checkpoint of "
                f"{len(kept.ends)} stages. Try partition(input_shapes=...) before fit, or as many stages."
            )
        self._goes_on = self._kept_in(arrays, about)
        changed = self._assigned(arrays)
        self._count.set(about["updates"])
        assign_scale(self._compilation.optimizer, arrays, about["updates"])
        self._count.set_fitted(about["fitted"], self._runner)
        return changed

    def _collected(self) -> Arrays:
        """Weights, state and what the optimizer has gathered, some of it on workers."""
        return self._lost.unless_lost(lambda: collected(self.model, self._stages.slots(), self._stages.shared()))

    def _assigned(self, arrays: Arrays) -> list[str]:
        """Put them back; gives what is not as it was. What this process has is put back even if a worker is lost."""
        assign_model(self.model, arrays)
        slots, shared = self._stages.slots(), self._stages.shared()
        return self._lost.unless_lost(lambda: assign_gathered(self.model, arrays, slots, shared))

    def _kept_in(self, arrays: Arrays, about: dict[str, Any]) -> Kept | None:
        """What devices held, if the run is trained as this one is; else that is left out."""
        there, kept = about.get("in_flight"), None
        if there is not None and not self._way().differences(there["of"]):
            devices = self.planner.layout.devices
            kept = self._lost.unless_lost(lambda: kept_of(self.model, self._stages, arrays, there, devices))
        if kept is None:
            leave_out(about)
        return kept
