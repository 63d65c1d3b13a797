"""Data parallelism behind a PipelineModel: TensorFlow's MirroredStrategy over the same devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from pipetrain.checkpoint.arrays import Arrays, assign, collected
from pipetrain.checkpoint.session import FitSession, Layout
from pipetrain.compute.keras_private import (
    clip_sums,
    count_of,
    distributed_spec,
    distribution_of,
    flat_layers,
    weights_of,
)
from pipetrain.compute.optimizer.adoption import Part, built, copy, with_frozen
from pipetrain.compute.optimizer.clone import clone
from pipetrain.compute.optimizer.slots import Slot, slots
from pipetrain.compute.tensorflow_private import one_replica
from pipetrain.frontend.attributes import known
from pipetrain.frontend.checks.devices import check_local
from pipetrain.frontend.checks.optimizer import check_loss_scaling, check_optimizer, check_own
from pipetrain.frontend.placement import Placement
from pipetrain.frontend.strategy import StepFunction
from pipetrain.schemes.table import DATA_PARALLEL
from pipetrain.trace.trace import Trace


class DataParallelStrategy:
    """A copy of the model mirrored on every device, trained by Keras itself.

    During ``fit`` the weights live in the copy; otherwise in the model.

    Args:
        model: the model to train.
        placement: its devices carry one replica each; its stages are not used.
    """

    def __init__(self, model: keras.Model, placement: Placement) -> None:
        self.model, self.placement = model, placement
        check_local(placement.distinct_devices)
        self.distribution = _mirrored(tuple(placement.distinct_devices))
        with self.distribution.scope():
            self.trained = keras.models.clone_model(model)
        self._session: FitSession | None = None
        self._is_training = False  # whether the weights live in the copy
        self._fitted_from = 0  # the optimizer's count of steps when this fit began
        self._newest_snapshot = 0
        self.optimizer: keras.optimizers.Optimizer | None = None
        self._replaced: tuple[Any, Any] = (None, None)  # the optimizer of the last ``compile``, and what trains instead
        self._given_steps = 0  # of the former, when it and the latter were last alike
        self._check_variables()
        self._load()

    @property
    def trace(self) -> Trace:
        """Empty: TensorFlow runs the replicas, and stages have no actions."""
        return Trace(())

    def build_metrics(self, own: Callable[[Any, Any], None], epoch_iterator: Any, batch: Any) -> None:
        """Keras' own, of a batch like those that will be read; and the optimizer, see ``_build``."""
        self._build()
        if epoch_iterator is not None:
            batch = self._batch_like(epoch_iterator)
        own(None, batch)

    def train_function(self, own: Callable[[], StepFunction]) -> StepFunction:
        """Keras' own, which TensorFlow runs on every device."""
        return own()

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

    def _load(self) -> None:
        """Mirror the model's weights, other state and seeds."""
        _copy(self.model, self.trained)

    def explanation(self, batch_size: int) -> str:
        """A text: how the model is cut, and the estimates of other ways to train it."""
        return self.placement.explanation(batch_size)

    def keras_arguments(self, optimizer: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The optimizer and the metrics of ``compile``, made anew: a strategy refuses variables not its own.

        What is frozen in the model by now is so in the copy. What the optimizer has gathered for the model goes along.
        XLA compiles nothing that several devices do: it takes no variables of other devices' than its own, as Keras'
        ``"auto"`` knows.
        """
        if settings.get("jit_compile") is True and self.distribution.num_replicas_in_sync > 1:
            warnings.warn("XLA cannot compile a step of several devices, which run without it.", stacklevel=3)
            settings = {**settings, "jit_compile": False}

        check_loss_scaling(optimizer, DATA_PARALLEL, None)

        def mirrored(value: Any) -> Any:
            return type(value).from_config(value.get_config()) if isinstance(value, keras.Metric) else value

        self._check_variables()
        for layer, copied in zip(flat_layers(self.model), flat_layers(self.trained), strict=True):
            copied.trainable = layer.trainable
        own = optimizer
        if isinstance(optimizer, keras.optimizers.Optimizer):
            own = self._own(optimizer)
        kept = {key: value for key, value in settings.items() if "metrics" not in key}
        metrics = {key: keras.tree.map_structure(mirrored, settings[key]) for key in settings if key not in kept}
        return own, {**kept, **metrics}

    def _check_variables(self) -> None:
        """ValueError if the model got variables that the copy has not, such as adapters in one of its layers."""
        copied = [variable.path for variable in self.trained.variables]
        if len(copied) != len(self.model.variables):
            more = [each.path for each in self.model.variables if each.path not in copied]
            raise ValueError(
                "The model has other variables than the copies that data parallelism trains. Received: "
                f"{', '.join(more[:6])}. Try PipelineModel(...) anew after enable_lora, or another scheme where Keras "
                "does not copy the adapters."
            )

    def _own(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        check_own(self._gathered(optimizer).weights, self.model.variables, optimizer)
        own = clone(optimizer, self.model.trainable_variables, self.trained.trainable_variables)
        clip_sums(own)
        self._hand_on(optimizer, own)
        given, before = self._replaced
        if optimizer is given and not self._trained_elsewhere():  # the copy may have loaded what the given one has not
            self._hand_on(before, own)
        self._replaced, self._given_steps = (optimizer, own), int(count_of(optimizer).numpy())
        return own

    def _gathered(self, optimizer: keras.optimizers.Optimizer) -> Part:
        """What it has gathered, for the model's own variables, whether it is built for these or for the copy's."""
        originals = dict(zip(map(id, self.trained.variables), self.model.variables, strict=True))
        return Part(optimizer, [originals.get(id(weight), weight) for weight in weights_of(optimizer)])

    def _hand_on(self, source: keras.optimizers.Optimizer, target: keras.optimizers.Optimizer) -> None:
        """What the one has gathered, and its count of steps, the other has too: one is given, one trains the copy."""
        gathered = self._gathered(source)
        if gathered.weights:
            weights = with_frozen(self.model.trainable_variables, gathered.weights)
            if distribution_of(target) is self.distribution:  # which refuses others' variables
                copies = dict(zip(map(id, self.model.variables), self.trained.variables, strict=True))
                weights = [copies[id(weight)] for weight in weights]
            with distribution_of(target).scope():
                built(target, weights)
            mine = self._gathered(target)
            copy(gathered, mine.slots, mine.shared)
        count_of(target).assign(tf.convert_to_tensor(count_of(source)))

    def _hand_back(self) -> None:
        """The optimizer of ``compile`` gets what its copy has gathered: it may train the model in another way next."""
        given, own = self._replaced
        if own is not None and own is self.optimizer:
            self._hand_on(own, given)
            self._given_steps = int(count_of(given).numpy())

    def _take_on(self) -> None:
        """Where the optimizer of ``compile`` has trained the model otherwise meanwhile, its copy goes on from it."""
        given, own = self._replaced
        if own is not None and own is self.optimizer and self._trained_elsewhere():
            check_own(weights_of(given), self.model.variables, given)
            self._hand_on(given, own)

    def _trained_elsewhere(self) -> bool:
        """Whether the optimizer of ``compile`` has made other steps since its copy was last like it."""
        return int(count_of(self._replaced[0]).numpy()) != self._given_steps

    def compiled(self, owner: keras.Model, loss: Any, jit_compile: Any) -> None:
        """Keras has compiled the owner with an optimizer of the copy's."""
        check_optimizer(owner.optimizer, DATA_PARALLEL, None, self.placement.stages)
        self.optimizer = owner.optimizer

    def begin(self, session: FitSession) -> None:
        """A ``fit`` begins: mirror the model's weights."""
        self.placement.learn(session.shapes)
        self._load()
        self._build()
        with self.distribution.scope():
            self._take_on()
        self._session, self._fitted_from = session, self._updates()

    def _build(self) -> None:
        """The optimizer has all of its slots, if there is one: interrupted in Keras' hands, it would have some."""
        if self.optimizer is not None:
            with self.distribution.scope():
                built(self.optimizer, self.trained.trainable_variables)

    def begin_epoch(self, steps: int | None) -> None:
        """From here on the weights live in the copy; Keras counts the steps."""
        self._is_training, self._newest_snapshot = True, 0

    @property
    def in_flight(self) -> int:
        """None: a step of data parallelism is over when it returns."""
        return 0

    def about(self) -> dict[str, Any]:
        """How many updates this ``fit`` has made, on which devices."""
        return {"fitted": self._fitted(), **self.placement.about(), "compiled": []}  # which is Keras' to decide

    def _fitted(self) -> int:
        """Updates since the start of ``fit``."""
        return self._updates() - self._fitted_from

    def _updates(self) -> int:
        return int(count_of(known(self.optimizer)).numpy())

    def state(self) -> Arrays:
        """All that training needs to go on; each replica gets the mean of all statistics, as it will again then."""
        self.drain()
        self._load()
        return collected(self.model, self._slots(), [self._gathered(self.optimizer).shared])

    def restore(self, arrays: Arrays, layout: Layout, updates: int, fitted: int) -> list[str]:
        """Go on from there, after so many updates, ``fitted`` of them of this ``fit``; gives what was not there."""
        with self.distribution.scope():
            missing = assign(self.model, arrays, self._slots(), [self._gathered(self.optimizer).shared])
            self._load()
            count_of(known(self.optimizer)).assign(updates)
        self._fitted_from = updates - fitted
        return missing

    def _slots(self) -> Iterator[Slot]:
        return slots(self.optimizer, self._gathered(self.optimizer).weights)

    def drain(self) -> None:
        """The mirrored weights flow back into the model; every step is over when it returns."""
        if self._is_training:
            _copy(self.trained, self.model)

    def finish(self) -> None:
        """The end of training: from here on the weights live in the model."""
        self.abort(store=True)

    def abort(self, store: bool) -> None:
        """The end of training by an exception; the weights flow back if ``store``, and what the optimizer gathered."""
        if store and self._is_training:
            self.drain()
            self._hand_back()
        self._is_training, self._session = False, None

    def lose(self, error: Exception) -> None:
        """No worker is of another process."""

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Drained; the copy then takes the model's weights."""
        self.drain()
        yield
        self._load()

    def evaluating(self, owner: keras.Model, steps: int | None) -> AbstractContextManager[None]:
        """Keras' own loop evaluates the copy, on all devices."""
        return nullcontext()

    def predicting(self, owner: keras.Model, steps: int | None) -> AbstractContextManager[None]:
        """Keras' own loop lets the copy predict, on all devices."""
        return nullcontext()

    def snapshots(self) -> Iterator[int]:
        """The present step, if its weights are wanted; the model then holds them."""
        every = self._session.snapshot_every if self._session else 0
        if every and (step := self._fitted()) % every == 0 and step != self._newest_snapshot:
            self._newest_snapshot = step
            self.drain()
            yield step


def _copy(source: keras.Model, target: keras.Model) -> None:
    for theirs, mine in zip(source.variables, target.variables, strict=True):
        mine.assign(tf.convert_to_tensor(theirs))


@cache
def _mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """One strategy for each set of devices.

    Every strategy numbers its collective operations from the same number, so that of two with the same devices the
    second would join the first's. On CPUs gradients are summed without collectives, which know but one set of devices.
    """
    on_cpus = all("CPU" in device for device in devices)
    summing = tf.distribute.ReductionToOneDevice() if on_cpus else None
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=summing)
