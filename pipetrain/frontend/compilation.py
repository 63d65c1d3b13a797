"""What one ``compile`` decides for stages: the optimizer, the loss, the metrics, and how minibatches are read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import HOST
from pipetrain.compute.functions.split import specs
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.inputs import Shapes, structure_of
from pipetrain.compute.keras_private import compile_arguments, flat_layers, mask_of, overridden, rate_of, weights_of
from pipetrain.compute.optimizer.clone import is_scheduled
from pipetrain.compute.optimizer.gradient_scaling import is_dynamic, stepping
from pipetrain.compute.optimizer.update import gathers, slots_per_weight, temporaries
from pipetrain.frontend.contexts import known
from pipetrain.frontend.input_data import InputData, Weigh, WeighTogether
from pipetrain.frontend.loss_reduction import Way, divides, found_way, hinges, is_known, ways
from pipetrain.frontend.metrics import TrackedMetrics, divided_together, undivided
from pipetrain.frontend.planner import Planner
from pipetrain.frontend.refusals import check_assignments, check_loop, check_optimizer, check_own
from pipetrain.run.worker_rows import on_one_device
from pipetrain.schemes.scheme import Scheme

Masks = Callable[[Sequence[tf.Tensor]], list[Any]]  # of a minibatch's inputs those of all outputs, None for some


def are_masked(model: keras.Model) -> list[bool]:
    """Which of the outputs carry a mask, as far as the model's own graph has it."""
    return [mask_of(each) is not None for each in model.outputs]


def masks_from_inputs(model: keras.Model) -> Masks | None:
    """A function of the inputs that gives the masks; None if there are none, or weights or chance have a part in one.

    A mask that is not of the shape of its output without the last dimension is not meant for the entries of a loss.
    """
    masks = {n: mask_of(each) for n, each in enumerate(model.outputs) if mask_of(each) is not None}
    if not masks or not all(_fits(mask, model.outputs[n]) for n, mask in masks.items()):
        return None
    of_inputs = keras.Function(model.inputs, list(masks.values()))
    if any(getattr(each, "variables", None) for each in of_inputs.operations):
        return None

    def given(inputs: Sequence[tf.Tensor]) -> list[Any]:
        found = dict(zip(masks, of_inputs(list(inputs)), strict=True))
        return [found.get(n) for n in range(len(model.outputs))]

    return given


def _fits(mask: Any, output: Any) -> bool:
    return tf.TensorShape(mask.shape[1:]).is_compatible_with(output.shape[1:-1])


def check_masks(masks: Sequence[Any], divides: bool, parts: int) -> None:
    """Raise ValueError for masked outputs whose loss is a mean over what the mask leaves, a piece at a time."""
    if parts > 1 and divides and any(mask is not None for mask in masks):
        raise ValueError(
            "An output of the model is masked, and Keras divides its loss by the number of entries that are not: it "
            f"cannot be put together from those of its microbatches and replicas. Received: {parts} parts of a "
            "batch. Try reduction='sum', or microbatches=1 and one replica of the last stage."
        )


def check_added(summed: Sequence[bool]) -> None:
    """Raise ValueError if some of the losses that layers add are sums over rows, of which Keras takes devices' mean."""
    if any(summed):
        raise ValueError(
            "A layer adds a loss that is a sum over rows, and MirroredStrategy would take the mean of the devices'. "
            "Received: scheme='data-parallel'. Try a mean over rows in add_loss, or scheme='all-reduce'."
        )


def check_hinges(hinges: Sequence[bool], labels: Sequence[Any]) -> None:
    """Raise ValueError for labels of 0 beside others than 1: a part without these would take 0 for -1.

    ``hinges`` are those among the losses, ``labels`` what these are given; one loss may be for all.
    """
    pairs = zip(hinges if len(hinges) == len(labels) else [any(hinges)] * len(labels), labels, strict=True)
    for y in (np.asarray(each) for is_hinge, each in pairs if is_hinge and each is not None):
        if np.any(y == 0) and not np.isin(y, (0, 1)).all():
            raise ValueError(
                "The loss of a batch cannot be put together from its parts': hinge losses take 0 for -1 where a batch "
                f"has no other labels than 0 and 1. Received: labels from {y.min():g} to {y.max():g}, 0 among them. "
                "Try labels of -1 and 1, or microbatches=1 and one replica of the last stage."
            )


def check_minimised(loss: Any, stages: Sequence[Stage]) -> None:
    """Refuse what has no loss, and weights of which none gets a gradient; warn of those that get none, as Keras does.

    ``stages`` have been traced.
    """
    if loss is None and not any(stage.is_penalized for stage in stages):
        raise ValueError(
            "There is nothing to minimise: no layer adds a loss. Received: compile with loss=None. Try loss='mse'."
        )
    trained = {id(each): each for stage in stages for each in stage.segment.trainable_variables}
    reached = {id(each) for stage in stages for each in stage.reached}
    untrained = [variable.path for each, variable in trained.items() if each not in reached]
    if untrained and not reached:
        raise ValueError(
            "No gradient of the loss reaches a weight that is trained. Received: trainable variables "
            f"{_some(untrained)}. Try a loss of outputs that depend on them, or a model without stop_gradient."
        )
    if untrained:
        warnings.warn(f"The loss has no gradient by these variables, which stay: {_some(untrained)}.", stacklevel=2)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:6])}, ... ({len(names)} in all)"


class LossOfParts:
    """Lives as long as a compilation.

    Args:
        loss: as ``compile`` was given it.
        parts: of a minibatch's rows, each with its own loss.
        metrics: which compute the loss.
        model: whose outputs it is of.

    ``weigh`` gives what minibatches have in place of sample weights, ``together`` that of parts that are read apart;
    None where they keep them.

    Raises:
        ValueError: for reductions that cannot be put together.
    """

    def __init__(self, loss: Any, parts: int, metrics: TrackedMetrics, model: keras.Model) -> None:
        self._loss, self._parts, self._metrics = loss, parts, metrics
        known = is_known(loss, model.outputs)
        self._is_tried = parts == 1 or known
        self._masks = masks_from_inputs(model) if parts > 1 and known else None
        self._masked = are_masked(model) if self._masks else []
        self._ways: list[Way] = ways(loss, parts, model.outputs, self._masks is not None)
        self._divided = metrics.divide(loss) if self._ways == ["divided"] else None
        self.weigh: Weigh | None = self._weighed if self._divided else None
        self.together: WeighTogether | None = divided_together if self._divided else None

    def _weighed(self, y: Any, sample_weight: Any, inputs: Sequence[tf.Tensor]) -> Any:
        assert self._divided is not None
        masks = self._masks(inputs) if self._masks else []
        return self._divided.with_divisors(y, sample_weight, tf.shape(inputs[0])[0], masks)

    @property
    def is_mean(self) -> bool:
        """Whether a minibatch's loss is the mean over its rows, else the sum of theirs; known once it is tried."""
        return self._ways[0] == "mean"

    def try_on(self, y: Any, sample_weight: Any, outputs: Callable[[], Sequence[tf.TensorSpec]]) -> None:
        """See by labels and weights such as the first minibatch's, if only that tells, for outputs of these specs.

        Raises ValueError for a loss that cannot be put together.
        """
        if self._parts > 1 and any(hinges(self._loss)):
            check_hinges(hinges(self._loss), keras.tree.flatten(y))
        if self._parts > 1 and self._loss is not None and y is not None:
            self._check_whole(y, undivided(sample_weight), outputs())
        if self._is_tried:
            return
        divided = self._divided.with_divisors if self._divided else None
        given = self._metrics.loss, divided, y, undivided(sample_weight), outputs()
        self._ways, self._is_tried = [found_way(self._ways, *given, named(self._loss))], True

    def _check_whole(self, y: Any, sample_weight: Any, outputs: Sequence[tf.TensorSpec]) -> None:
        """Raise ValueError for labels that fit a part's outputs alone, such as one for every class of as many rows."""
        rows = next(iter(tf.nest.flatten(y))).shape[0]
        whole = [tf.TensorSpec([rows, *each.shape[1:]], each.dtype) for each in outputs]
        y, sample_weight = tf.nest.map_structure(
            lambda each: None if each is None else tf.TensorSpec(each.shape, each.dtype), (y, sample_weight)
        )
        with keras.StatelessScope():
            try:
                tf.function(self._metrics.loss, autograph=False).get_concrete_function(y, whole, sample_weight)
            except (TypeError, ValueError) as error:
                labels, shapes = tf.nest.map_structure(lambda each: each if each is None else each.shape, (y, whole))
                raise ValueError(
                    f"The loss of a whole batch cannot be computed: {error} Received: y of shape {labels} for outputs "
                    f"of shape {shapes}. Try labels of the shape that the loss takes."
                ) from error

    def check_masks(self, masks: Sequence[Any]) -> None:
        """Raise ValueError if the loss cannot be put together where outputs have these masks."""
        if not self._masked or self._masked != [mask is not None for mask in masks]:
            check_masks(masks, divides(self._loss), self._parts)


def named(loss: Any) -> str:
    """The losses by their names."""
    return ", ".join(
        str(getattr(each, "__name__", None) or getattr(each, "name", None) or each) for each in keras.tree.flatten(loss)
    )


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
    return specs(outputs)


def trained_in(model: keras.Model) -> list[tuple[str, bool]]:
    """Every layer and every variable of a model, and whether it is trainable."""
    layers = [(each.name, each.trainable) for each in flat_layers(model)]
    return layers + [(each.path, each.trainable) for each in model.variables]
