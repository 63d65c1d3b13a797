"""Data parallelism behind a PipelineModel: TensorFlow's MirroredStrategy over the same devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from pipetrain.checkpoint.state import Arrays, RunState, assign, assign_scale, collected, leave_out, scale_arrays
from pipetrain.compute.functions.stage_function import summed_over_rows
from pipetrain.compute.graph.inputs import beside, memories
from pipetrain.compute.graph.sharing import is_seed
from pipetrain.compute.keras_private import (
    built_when_traced,
    compiled_loss,
    count_of,
    distributed,
    distributed_spec,
    flat_layers,
    is_own,
    map_losses,
    rows_of_minibatches,
    weights_of,
    weights_of_layer,
)
from pipetrain.compute.optimizer.clone import clone
from pipetrain.compute.optimizer.gradient_scaling import stepping
from pipetrain.compute.optimizer.slots import OptimizerPart, Slot, adopt, built, slots
from pipetrain.compute.optimizer.update import slots_per_weight, temporaries
from pipetrain.compute.tensorflow_private import one_replica
from pipetrain.frontend.compilation import check_added
from pipetrain.frontend.contexts import Meanwhile, known
from pipetrain.frontend.fit_session import FitSession
from pipetrain.frontend.layout import check_local, check_remembered
from pipetrain.frontend.mirroring import DeviceLoss, Mirroring
from pipetrain.frontend.planner import Planner
from pipetrain.frontend.refusals import check_optimizer, check_own
from pipetrain.frontend.strategy import StepFunction
from pipetrain.plan.choice import Explanation
from pipetrain.schemes.options import AnyScheme
from pipetrain.schemes.scheme import UpdateRule
from pipetrain.schemes.table import DATA_PARALLEL
from pipetrain.trace.trace import Trace


class DataParallelStrategy:
    """The model itself, whose variables every device has while Keras trains it, as if made in the strategy's scope.

    Nothing is copied but the values of variables: those of the model, of its optimizer and of its metrics. All else
    that layers have, such as vocabularies and functions, is the model's own.

    Args:
        planner: of the model; the devices of its layout train the whole model.
    """

    def __init__(self, planner: Planner) -> None:
        self.model, self.planner = planner.chain.model, planner
        model, devices = self.model, planner.layout.distinct_devices
        check_local(devices)
        self._devices = len(devices)
        check_remembered(memories([model]), self._devices)
        self.distribution = _mirrored(tuple(devices))
        self._mirroring = Mirroring(self.distribution)
        self._meanwhile = ExitStack()  # what is undone when the model is by itself again
        self._owner: keras.Model | None = None
        self._loss: DeviceLoss | None = None
        self._is_checked = False  # whether the losses that layers add have been tried
        self._session: FitSession | None = None
        self._fitted_from = 0  # the optimizer's count of steps when this fit began
        self._newest_snapshot = 0
        self.optimizer: keras.optimizers.Optimizer | None = None

    @property
    def trained(self) -> keras.Model:
        """The model itself."""
        return self.model

    @property
    def trace(self) -> Trace:
        """Empty: TensorFlow runs the replicas, and stages have no actions."""
        return Trace(())

    @property
    def readers(self) -> Sequence[str]:
        """None: MirroredStrategy divides the data set of this process."""
        return ()

    @property
    def staleness(self) -> Sequence[int]:
        """None: every step is over before the next one."""
        return [0]

    def build_metrics(self, own: Callable[[Any, Any], None], epoch_iterator: Any, batch: Any) -> None:
        """Keras' own, of a batch like those that will be read; and what kind the loss is."""
        if epoch_iterator is not None:
            batch = self._batch_like(epoch_iterator)
            if self._session is not None and not self._session.is_evaluating:  # where statistics are only read
                known(self._loss).check_rows(rows_of_minibatches(epoch_iterator))
        own(None, batch)
        compiled = compiled_loss(known(self._owner))
        self._check_added()
        if compiled is not None:
            _, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            known(self._loss).measure(compiled, y, sample_weight, self.planner.chain.pack(self.model.outputs))

    def _check_added(self) -> None:
        """Raise ValueError if a layer adds a loss that is a sum over rows: Keras takes the mean of the devices'.

        Keras' own layers add means.
        """
        if (
            not self._is_checked
            and self._devices > 1
            and not all(is_own(type(each)) for each in flat_layers(self.model))
        ):
            chain = self.planner.chain
            whole = chain.segment(0, len(chain.blocks))
            check_added(summed_over_rows(whole, [None] * len(whole.inputs), True))
        self._is_checked = True

    def train_function(self, own: Callable[[], StepFunction]) -> StepFunction:
        """Keras' own, which TensorFlow runs on every device."""
        return own()

    def loss_of_part(self, loss: Any, x: Any, y_pred: Any, training: bool) -> Any:
        """With gradients for a device's part of the minibatch."""
        return known(self._loss).of_part(loss, x, y_pred, training)

    def _batch_like(self, epoch_iterator: Any) -> Any:
        """One device's part of a batch, or its specs, which do where they say how many dimensions there are.

        To read a batch is to put a data set that is shuffled, or a generator, out of step.
        """
        given = distributed_spec(epoch_iterator)
        specs = keras.tree.map_structure(one_replica, given)
        if all(each.shape.rank for each in keras.tree.flatten(specs)):
            return specs
        _, _, batches = next(iter(epoch_iterator))
        # of all devices' parts, whose rows may differ in number, the first
        return keras.tree.map_structure(
            lambda part: self.distribution.experimental_local_results(part)[0], next(batches)
        )

    def explanation(self, batch_size: int, scheme: AnyScheme) -> Explanation:
        """A text: how the model is cut, and the estimates of other ways to train it."""
        return self.planner.explanation(batch_size, scheme)

    def keras_arguments(self, optimizer: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of ``compile`` as they are; XLA compiles nothing that several devices do.

        It takes no variables of other devices' than its own, as Keras' ``"auto"`` knows.
        """
        if settings.get("jit_compile") is True and self._devices > 1:
            warnings.warn("XLA cannot compile a step of several devices, which run without it.", stacklevel=3)
            settings = {**settings, "jit_compile": False}
        return optimizer, settings

    def compiled(self, owner: keras.Model, loss: Any, jit_compile: Any) -> None:
        """Keras has compiled the owner. Raises ValueError for what several devices would not train alike."""
        check_optimizer(owner.optimizer, DATA_PARALLEL, None, self.planner.layout.stages)
        self._owner, self.optimizer = owner, owner.optimizer
        steps, training = stepping(owner.optimizer), self.planner.training
        slots = slots_per_weight(steps, UpdateRule())
        training = training._replace(slots=slots, gathers=False, temporaries=temporaries(steps))
        self.planner.learn_training(training, steps)
        self._check_own()
        self._mirroring.forget(self.model.variables)  # another optimizer's slots, and metrics
        self._loss = DeviceLoss(loss, self._devices, self.model.outputs, self._keeps_statistics())
        map_losses(owner, self._loss.changed)

    def _check_own(self) -> None:
        check_own(weights_of(known(self.optimizer)), self.model.variables, known(self.optimizer))

    def _keeps_statistics(self) -> bool:
        """Whether layers may have state of the rows that they see in training."""
        others = {id(each) for each in weights_of_layer(self.model)}
        adapted = [layer for layer in flat_layers(self.model) if hasattr(layer, "adapt")]
        others |= {id(each) for layer in adapted for each in layer.variables}
        return any(id(each) not in others and not is_seed(each) for each in self.model.variables)

    def begin(self, session: FitSession) -> None:
        """A ``fit`` begins: every device gets the model's variables."""
        self.planner.learn_shapes(session.shapes)
        self._check_own()
        try:
            self._mirror()
        except BaseException:
            self.abort(store=False)
            raise
        self._session, self._fitted_from, self._newest_snapshot = session, self._updates(), 0

    def _mirror(self) -> None:
        """Every device gets the variables of the model, its optimizer and its metrics; until ``_end``."""
        optimizer, owner = self.optimizer, self._owner
        if optimizer is not None and owner is not None:
            self._build(optimizer)
            self._meanwhile.enter_context(distributed(optimizer, self.distribution))
        for each in flat_layers(self.model):
            if isinstance(each, keras.Model):  # its functions read its own variables
                apart = Meanwhile(each, train_function=None, test_function=None, predict_function=None)
                self._meanwhile.enter_context(apart)
        self._meanwhile.callback(self._mirroring.end)
        self._mirroring.begin(self._variables())

    def _variables(self) -> list[Any]:
        found = [*self.model.variables, *beside(self.model)]
        if self._owner is not None:
            found += [each for metric in metrics_of(self._owner) for each in metric.variables]
        if self.optimizer is not None:
            found += self.optimizer.variables
        return list({id(each): each for each in found}.values())

    def _build(self, optimizer: keras.optimizers.Optimizer) -> None:
        """It has a slot of each weight that is trained, of those too that were frozen before."""
        weights = self.model.trainable_variables
        built(optimizer, weights)
        if not {*map(id, weights)} <= {*map(id, weights_of(optimizer))}:
            other = clone(optimizer, weights, weights)
            built(other, weights)
            adopt(optimizer, weights, [OptimizerPart(other, weights)])

    @property
    def in_flight(self) -> int:
        """None: a step of data parallelism is over when it returns."""
        return 0

    def about(self) -> dict[str, Any]:
        """How many updates this ``fit`` has made, on which devices."""
        return {"fitted": self._fitted(), **self.planner.about(), "compiled": []}  # which is Keras' to decide

    def _fitted(self) -> int:
        """Updates since the start of ``fit``."""
        return self._updates() - self._fitted_from

    def _updates(self) -> int:
        return int(count_of(known(self.optimizer)).numpy())

    @property
    def drains(self) -> bool:
        """Nothing is in flight after a step."""
        return False

    def state(self) -> RunState:
        """All that training needs to go on; each device gets the first one's statistics, as it will again then."""
        self._mirroring.agree()
        self.drain()
        values = collected(self.model, self._slots(), [self._part().shared])
        return RunState(values | scale_arrays(known(self.optimizer)), {})

    def restore(self, arrays: Arrays, about: dict[str, Any]) -> list[str]:
        """Go on from there; gives what is not as it was, see ``assign_gathered``."""
        leave_out(about)
        updates, fitted = about["updates"], about["fitted"]
        changed = assign(self.model, arrays, self._slots(), [self._part().shared])
        count_of(known(self.optimizer)).assign(updates)
        assign_scale(known(self.optimizer), arrays, updates)
        self._fitted_from = updates - fitted
        return changed

    def _part(self) -> OptimizerPart:
        return OptimizerPart(known(self.optimizer), weights_of(known(self.optimizer)))

    def _slots(self) -> Iterator[Slot]:
        return slots(known(self.optimizer), weights_of(known(self.optimizer)))

    def drain(self) -> None:
        """Every step is over when it returns; should training fail, these are the weights that the model keeps."""
        self._mirroring.store()

    def finish(self) -> None:
        """The end of training: from here on the model is by itself."""
        self.abort(store=True)

    def abort(self, store: bool) -> None:
        """The end of training by an exception, with the weights of now if ``store``."""
        try:
            if store:
                self.drain()
        finally:
            self._meanwhile.close()
            self._session = None

    def lose(self, error: Exception) -> None:
        """No worker is of another process."""

    @contextmanager
    def changing(self) -> Iterator[None]:
        """What is assigned to the model's variables, all devices have."""
        yield

    def evaluating(self, owner: keras.Model, steps: int | None) -> AbstractContextManager[None]:
        """Keras' own loop evaluates the model, on all devices."""
        return self._mirrored_meanwhile()

    def predicting(self, owner: keras.Model, steps: int | None) -> AbstractContextManager[None]:
        """Keras' own loop lets the model predict, on all devices."""
        return self._mirrored_meanwhile()

    def _mirrored_meanwhile(self) -> AbstractContextManager[None]:
        return nullcontext() if self._mirroring.is_on else self._mirrored_once()

    @contextmanager
    def _mirrored_once(self) -> Iterator[None]:
        try:
            self._mirror()
            yield
        finally:
            self.abort(store=True)

    def snapshots(self) -> Iterator[int]:
        """The present step, if its weights are wanted; the model then holds them."""
        every = self._session.snapshot_every if self._session else 0
        if every and (step := self._fitted()) % every == 0 and step != self._newest_snapshot:
            self._newest_snapshot = step
            self.drain()
            yield step


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """Those of a compiled model, with the user's that Keras has not built yet."""
    users = [each for each in built_when_traced(model) if isinstance(each, keras.Metric)]
    return [*model.metrics, *users]


@cache
def _mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """One strategy for each set of devices.

    Every strategy numbers its collective operations from the same number, so that of two with the same devices the
    second would join the first's. On CPUs gradients are summed without collectives, which know but one set of devices.
    """
    on_cpus = all("CPU" in device for device in devices)
    summing = tf.distribute.ReductionToOneDevice() if on_cpus else None
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=summing)
