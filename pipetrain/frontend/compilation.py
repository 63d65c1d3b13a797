"""What one ``compile`` decides for stages: the optimizer, the loss, the metrics, and how minibatches are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.cores import HOST
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.inputs import Shapes, structure_of
from pipetrain.compute.keras_private import compile_arguments, flat_layers, overridden, rate_of, weights_of
from pipetrain.compute.optimizer.clone import is_scheduled
from pipetrain.compute.optimizer.gradient_scaling import is_dynamic, stepping
from pipetrain.compute.optimizer.update import gathers, slots_per_weight, temporaries
from pipetrain.frontend.contexts import known
from pipetrain.frontend.input_data import InputData
from pipetrain.frontend.loss_of_parts import LossOfParts, check_minimised
from pipetrain.frontend.metrics import TrackedMetrics
from pipetrain.frontend.planner import Planner
from pipetrain.frontend.refusals import check_assignments, check_loop, check_optimizer, check_own
from pipetrain.run.worker_rows import on_one_device
from pipetrain.schemes.scheme import Scheme


def resolved(model: keras.Model, given: dict[str, Any]) -> dict[str, Any]:
    """Those that the model's own ``compile`` makes of what it is given, such as a task's optimizer and loss.

    It is compiled by that. Raises TypeError if it does not call Keras' ``compile``.
    """
    if not overridden(model, ["compile"]):
        return given
    before = compile_arguments(model)
    model.compile(**given)
    if (made := compile_arguments(model)) is None or made is before:
        raise TypeError(
            f"The model's own compile does not call Keras'. Received: model={model.name!r} of class "
            f"{type(model).__name__}. Try super().compile(...) in it."
        )
    kept = {name: given[name] for name in ("jit_compile", "auto_scale_loss") if name in given}
    return _without_defaults(made) | kept


def arguments_of(model: keras.Model) -> dict[str, Any]:
    """Those with which a compiled model goes on as it is, with its very optimizer; XLA is for profiles to decide on."""
    made = _without_defaults(known(compile_arguments(model)))
    return made | {"optimizer": model.optimizer, "auto_scale_loss": False}


def without_one_step(made: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without ``steps_per_execution=1``, Keras' value where nothing is asked: then the runner chooses."""
    return {name: value for name, value in made.items() if name != "steps_per_execution" or value != 1}


def _without_defaults(made: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without what Keras has made where nothing is asked: of XLA they tell nothing."""
    return {name: value for name, value in without_one_step(made).items() if name != "jit_compile"}


class Compilation:
    """Lives from one ``compile`` to the next.

    Args:
        owner: the PipelineModel, which Keras has compiled.
        loss: the one that ``compile`` was given.
        scheme: by which it is trained.
        planner: of the model and its stages.
        counted: counts the minibatches that the optimizer has been told of.
        built: called when the metrics have their variables.

    ``optimizer`` is the compiled one, ``steps`` the one that makes the steps, which another may wrap to scale the loss;
    ``slots`` are its variables for each weight, ``temporaries`` what an update makes beside, in multiples of the weight
    at work, and it ``gathers`` if it uses all gradients at once.

    Raises:
        ValueError: for an optimizer, a loss or a way to run steps that a pipeline does not have.
    """

    def __init__(
        self,
        owner: keras.Model,
        loss: Any,
        scheme: Scheme,
        planner: Planner,
        counted: tf.Variable,
        built: Callable[[], None],
    ) -> None:
        self._owner = owner
        self.optimizer, self._loss, self._chain = owner.optimizer, loss, planner.chain
        self._scheme = scheme
        self.steps = steps = stepping(self.optimizer)
        self._model = planner.chain.model
        stages = planner.layout.stages
        check_loop(owner.run_eagerly, owner.steps_per_execution)
        check_optimizer(self.optimizer, scheme.name, scheme, stages)
        self._check_own()
        rule = scheme.rule(0, 2 * stages)
        self.gathers = is_dynamic(self.optimizer) or gathers(steps, rule, self._model.trainable_variables)
        self.slots, self.temporaries = slots_per_weight(steps, rule), temporaries(steps)
        self.metrics = TrackedMetrics(owner, self._model.outputs, planner.chain.pack, counted, built)
        self._scheduled = is_scheduled(steps)  # then each stage's own copy knows the rate
        self._trained_as: list[tuple[str, bool]] = []  # when training was traced first
        self._traced_for: list[Any] = []  # the specs of data
        parts = planner.training.microbatches * planner.layout.replicas[-1]  # of its rows, each with its own loss
        self._of_parts = LossOfParts(loss, parts, self.metrics, self._model)
        rate = None if self._scheduled else rate_of(steps).value
        self.data = InputData(self._model, rate, self._of_parts.weigh, self._of_parts.together)

    def _check_own(self) -> None:
        check_own(weights_of(self.steps), self._model.variables, self.steps)

    def check(self) -> None:
        """Raise ValueError if the optimizer, or how steps are run, is not any more as it was compiled."""
        check_loop(self._owner.run_eagerly, self._owner.steps_per_execution)
        if is_scheduled(self.steps) != self._scheduled:
            raise ValueError(
                "The learning rate became a schedule, or ceased to be one, after compile. Received: "
                f"learning_rate={rate_of(self.steps)!r}. Try compile again."
            )
        self._check_own()

    def check_trained(self, traces: bool = True) -> None:
        """Raise ValueError if what is trainable has changed since training was traced first, and Keras would trace now.

        As in plain Keras that takes effect with the next ``compile``; but what is traced again, for stages that are
        made anew or for data of another spec, would follow it.
        """
        before, now = self._trained_as, trained_in(self._model)
        if before and before != now and (traces or self.data.spec not in self._traced_for):
            changed = [f"{name!r} with trainable={flag}" for name, flag in now if (name, flag) not in before]
            raise ValueError(
                "What is trained changed after compile, and the model's functions have to be made anew. Received: "
                f"{', '.join(changed[:4]) or 'fewer layers or variables'}. Try compile again."
            )

    def traced(self) -> None:
        """Training is traced for the present data: what is trainable by now is so until the next ``compile``."""
        self._trained_as = self._trained_as or trained_in(self._model)
        if self.data.spec not in self._traced_for:
            self._traced_for.append(self.data.spec)

    def learning_rate(self) -> float | None:
        """That of now; None where each stage's own copy of a schedule knows it."""
        return None if self._scheduled else float(rate_of(self.steps).value.numpy())

    @property
    def loss_is_mean(self) -> bool:
        """Whether a minibatch's loss is the mean over its rows, else the sum of theirs; known once it is measured."""
        return self._of_parts.is_mean

    def measure_loss(self) -> None:
        """Try the loss, if only that tells what kind it is, on labels such as were read."""
        first = self.data.first
        if first is not None:
            outputs = partial(output_specs, self._model, self._chain, self.data.shapes)
            y, sample_weight = on_one_device((first.y, first.sample_weight), HOST)
            self._of_parts.try_on(y, sample_weight, outputs)

    def check_traced(self, stages: Sequence[Stage]) -> None:
        """Raise ValueError for what only a trace shows: nothing to minimise, or assignments to trained weights."""
        check_minimised(self._loss, stages)
        check_assignments(stages, self._scheme)

    def check_masks(self, masks: Sequence[Any]) -> None:
        """Raise ValueError if the loss cannot be put together where outputs have these masks."""
        self._of_parts.check_masks(masks)


def output_specs(model: keras.Model, chain: Chain, shapes: Shapes) -> list[tf.TensorSpec]:
    """The outputs for inputs of such shapes, with the dimensions that the model leaves open; the rows are open."""
    outputs = chain.specs(len(chain.blocks))
    if any(None in each.shape[1:] for each in outputs):
        given = {
            id(x): keras.KerasTensor((None, *shape), x.dtype) for x, shape in zip(model.inputs, shapes, strict=True)
        }
        made = model.compute_output_spec(keras.tree.map_structure(lambda x: given[id(x)], structure_of(model)))
        outputs = keras.tree.flatten(made)
    return [tf.TensorSpec(each.shape, each.dtype) for each in outputs]


def trained_in(model: keras.Model) -> list[tuple[str, bool]]:
    """Every layer and every variable of a model, and whether it is trainable."""
    layers = [(each.name, each.trainable) for each in flat_layers(model)]
    return layers + [(each.path, each.trainable) for each in model.variables]
