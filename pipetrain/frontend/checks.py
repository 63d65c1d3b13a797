"""Refusals: what would go wrong later is named before training starts."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.graph.blocks import Block, in_order
from pipetrain.compute.graph.segment import adapted
from pipetrain.compute.optimizer.spikes import check_compensable
from pipetrain.compute.optimizer.velocity import check_predictable
from pipetrain.schemes.schedules import groups_of
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import DATA_PARALLEL, SCHEMES
from pipetrain.schemes.validation import check

DEFAULT_ROWS = 32  # Keras' batch size where none is given
DEFAULT_MICROBATCHES = 4
WHOLE_BATCH = (keras.losses.Dice, keras.losses.Tversky, keras.losses.Circle)  # which look at all rows at once


def check_optimizer_kind(optimizer: Any) -> None:
    """Refuse, by name, optimizers that hold others."""
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(f"Loss scaling is not supported. Received: optimizer={name}. Try the policy 'mixed_bfloat16'.")
    if hasattr(optimizer, "optimizers"):
        raise ValueError(f"One optimizer trains all layers. Received: optimizer={name}. Try a single one.")


def check_optimizer(optimizer: keras.optimizers.Optimizer, scheme: str, chosen: Scheme | None, stages: int) -> None:
    """Refuse, by name, what one clone of the optimizer per stage, or per device, or the scheme, would get wrong.

    ``chosen`` is the scheme of this name, None for data-parallel.
    """
    name, pipelined = type(optimizer).__name__, chosen is not None
    apart = chosen is not None and stages > 1 and (chosen.asynchronous or chosen.schedule.chunks > 1)
    refused = {
        "global_clipnorm": (
            apart,
            "the stages update at different times, and to wait for the norm of all would stop the pipeline",
            "clipnorm, clipvalue, or a synchronous scheme: 'gpipe' or '1f1b'",
        ),
        "loss_scale_factor": (pipelined, "a pipeline does not scale losses", "without it"),
        "use_ema": (True, "averages of the weights are not kept", "without it"),
        "gradient_accumulation_steps": (
            True,
            "the weights are updated after every minibatch",
            "a larger batch size, or a scheme with microbatches",
        ),
    }
    for setting, (applies, why, remedy) in refused.items():
        if applies and getattr(optimizer, setting, None):
            received = f"scheme={scheme!r}, optimizer={name}({setting}={getattr(optimizer, setting)})"
            raise ValueError(f"{setting} is not supported here: {why}. Received: {received}. Try {remedy}.")
    if chosen is not None and chosen.spikes:
        check_compensable(optimizer)
    if chosen is not None and chosen.policy.predicts:
        check_predictable(optimizer, scheme)


def check_model(model: keras.Model) -> None:
    """Refuse a model that changes how it is trained: a pipeline would not."""
    for method in ("train_step", "compute_loss"):
        if not getattr(type(model), method).__module__.startswith("keras."):
            raise TypeError(
                f"A pipeline has its own training step. Received: model={model.name!r}, whose class "
                f"{type(model).__name__} overrides {method}. Try a plain Functional model, with the loss in compile."
            )


def check_precision(blocks: Sequence[Block]) -> None:
    """Refuse layers that need loss scaling, which stages do not have."""
    for call in (call for block in blocks for call in block.calls):
        policy = getattr(call.operation, "dtype_policy", None)
        if policy is not None and policy.compute_dtype == "float16":
            raise ValueError(
                f"float16 needs loss scaling, which a pipeline does not have. Received: layer {call.name!r} with "
                f"dtype policy {policy.name!r}. Try the policy 'mixed_bfloat16'."
            )


def check_own(built_for: Sequence[Any], variables: Sequence[Any], optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse an optimizer that is built for variables that are not the model's: its slots would be lost."""
    if not {id(each) for each in built_for} <= {id(each) for each in variables}:
        name, steps = type(optimizer).__name__, int(optimizer.iterations.numpy())
        raise ValueError(
            f"The optimizer has trained another model, and what it remembers of it would be lost. Received: "
            f"optimizer={name} after {steps} steps. Try {name}.from_config(optimizer.get_config())."
        )


def check_compiled(now: Any, compiled: Any) -> None:
    """Refuse an optimizer that was set in place of the compiled one, of which the stages know nothing."""
    if now is not compiled:
        raise ValueError(
            f"The stages have the optimizer of compile. Received: optimizer={type(now).__name__}, set after it. "
            "Try compile again."
        )


def check_backup(callbacks: Sequence[Any], scheme: str, beside_slots: Callable[[], Sequence[str]]) -> None:
    """Refuse Keras' backup where training needs more to go on than a Keras file holds: ``beside_slots``."""
    backs_up = any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks)
    if backs_up and (left_out := beside_slots()):
        raise ValueError(
            f"Training would not go on as it was: to predict weights, {scheme!r} remembers more of the last step than "
            f"a Keras file holds. Received: callbacks with BackupAndRestore, which leaves out {[*left_out]}. "
            "Try pipetrain.callbacks.PipelineCheckpoint."
        )


def check_loop(run_eagerly: bool, steps_per_execution: int) -> None:
    """Refuse ways of running a step that a pipeline does not have."""
    if run_eagerly:
        raise ValueError("Stages run as TensorFlow functions. Received: run_eagerly=True. Try run_eagerly=False.")
    if steps_per_execution != 1:
        raise ValueError(
            f"Minibatches enter the pipeline one by one. Received: steps_per_execution={steps_per_execution}. Try 1."
        )


def check_replicas(scheme: str, replicas: Any) -> None:
    """Raise ValueError for replicas of a scheme that has no stages."""
    if scheme in ("single", DATA_PARALLEL) and replicas is not None:
        raise ValueError(
            f"The scheme {scheme!r} has no stages to replicate. Received: replicas={replicas!r}. Try leaving it out."
        )


def loss_is_mean(loss: Any, pieces: int) -> bool:
    """Whether the loss is the mean over the rows (True), or the sum of theirs, or not reduced (False).

    What is not reduced is summed where gradients start from it, as in Keras. Where microbatches or replicas of the last
    stage divide the rows into pieces, a minibatch's loss must follow from theirs: ValueError for other reductions, and
    for several of them at once.
    """
    reductions = {_reduction(each) for each in keras.tree.flatten(loss) if each is not None}
    if reductions in ({"sum"}, {"none"}):
        return False
    if pieces > 1 and not reductions <= {"mean"}:
        raise ValueError(
            "The loss of a batch cannot be put together from those of its microbatches and replicas. "
            f"Received: reduction={sorted(map(str, reductions))} for {pieces} pieces of a batch. "
            "Try reduction='sum_over_batch_size', or microbatches=1 and one replica of the last stage."
        )
    return True


def _reduction(loss: Any) -> str:
    """How a loss is reduced; what is no ``Loss``, Keras makes one that is the mean."""
    reduction = loss.reduction if isinstance(loss, keras.losses.Loss) else "mean"
    return {"sum_over_batch_size": "mean", None: "none"}.get(reduction, reduction)


def is_measured(loss: Any) -> bool:
    """Whether only trying tells what a loss of several rows has to do with those of each."""
    return any(
        inspect.isfunction(each) or (isinstance(each, keras.losses.Loss) and not _goes_by_rows(each))
        for each in keras.tree.flatten(loss)
    )


def _goes_by_rows(loss: keras.losses.Loss) -> bool:
    """Whether this is a loss of Keras' that looks at one row at a time."""
    kind = type(loss)
    return kind.__module__.startswith("keras.src.") and not isinstance(loss, WHOLE_BATCH)


def check_masks(masks: Sequence[Any], loss_is_mean: bool, pieces: int) -> None:
    """Raise ValueError for masked outputs whose loss is a mean over what the mask leaves, a piece at a time."""
    if pieces > 1 and loss_is_mean and any(mask is not None for mask in masks):
        raise ValueError(
            "An output of the model is masked, and Keras divides its loss by the number of entries that are not: it "
            f"cannot be put together from those of its microbatches and replicas. Received: {pieces} pieces of a "
            "batch. Try reduction='sum', or microbatches=1 and one replica of the last stage."
        )


def measured_mean(loss: Callable[..., tf.Tensor], targets: Any, outputs: Sequence[Any]) -> bool:
    """``loss_is_mean`` of functions that give one number for all rows, by that of two rows and of each alone.

    ``targets`` are the specs of labels and sample weights. Raises ValueError for neither a mean nor a sum.
    """

    def of(*rows: float) -> float:
        def column(spec: Any, values: Sequence[float]) -> Any:
            wide = tf.reshape(tf.constant(values), [-1] + [1] * (len(spec.shape) - 1))
            return tf.cast(tf.tile(wide, [1, *(size or 1 for size in spec.shape[1:])]), spec.dtype)

        ones = [1.0] * len(rows)
        y, sample_weight = tf.nest.map_structure(lambda spec: None if spec is None else column(spec, ones), targets)
        with keras.StatelessScope():
            return float(tf.reduce_sum(loss(y, [column(output, rows) for output in outputs], sample_weight)))

    both, alone = of(0.25, 0.75), of(0.25) + of(0.75)
    is_mean = math.isclose(both, alone / 2, rel_tol=1e-3, abs_tol=1e-6)
    if not is_mean and not math.isclose(both, alone, rel_tol=1e-3):
        raise ValueError(
            "The loss of a batch cannot be put together from its pieces': it is neither a mean nor a sum over "
            f"the rows. Received: a loss of {both:.6g} for two rows that have {alone:.6g} together one by one. "
            "Try microbatches=1 and one replica of the last stage."
        )
    return is_mean


def check_minimised(loss: Any, stages: Sequence[Stage]) -> None:
    """Refuse what has no loss, and weights of which none gets a gradient; warn of those that get none, as Keras does.

    ``stages`` have been traced.
    """
    if loss is None and not any(stage.is_penalized for stage in stages):
        raise ValueError(
            "There is nothing to minimise: no layer adds a loss. Received: compile with loss=None. Try loss='mse'."
        )
    untrained = [variable.path for stage in stages for variable in stage.untrained]
    if untrained and len(untrained) == sum(len(stage.variables) for stage in stages):
        raise ValueError(
            "No gradient of the loss reaches a weight that is trained. Received: trainable variables "
            f"{_some(untrained)}. Try a loss of outputs that depend on them, or a model without stop_gradient."
        )
    if untrained:
        warnings.warn(f"The loss has no gradient by these variables, which stay: {_some(untrained)}.", stacklevel=2)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:6])}, ... ({len(names)} in all)"


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse the callback that swaps weights with averages of them, which are not kept."""
    if any(isinstance(each, keras.callbacks.SwapEMAWeights) for each in callbacks):
        raise ValueError(
            "There are no averages of weights (use_ema) to swap with. Received: callbacks with SwapEMAWeights. "
            "Try without it."
        )


def check_data(x: Any, y: Any) -> None:
    """Refuse missing data and arrays of different lengths."""
    if x is None:
        raise ValueError(
            "There is nothing to train on. Received: x=None. Try fit(x, y) with arrays or a tf.data.Dataset."
        )
    lengths = {len(array) for array in keras.tree.flatten((x, y)) if _is_array(array)}
    if 0 in lengths:
        raise ValueError("There is nothing to train on. Received: x or y with no rows. Try at least one row.")
    if len(lengths) > 1:
        raise ValueError(
            f"Inputs and labels differ in length. Received: x and y with {sorted(lengths)} rows. "
            "Try as many labels as inputs."
        )


def first_rows(x: Any, batch_size: int | None) -> int | None:
    """The rows of the first minibatch, where they can be known before it is there."""
    arrays = [array for array in keras.tree.flatten(x) if _is_array(array)]
    if arrays:
        return min(batch_size or DEFAULT_ROWS, len(arrays[0]))
    if isinstance(x, tf.data.Dataset):
        shapes = [spec.shape for spec in tf.nest.flatten(x.element_spec) if isinstance(spec, tf.TensorSpec)]
        return int(shapes[0][0]) if shapes and shapes[0].rank and shapes[0][0] is not None else None
    return None


def check_rows(rows: int | None, microbatches: int) -> None:
    """Refuse a batch with fewer rows than microbatches."""
    if rows is not None and rows < microbatches:
        raise ValueError(
            f"The batch is smaller than its microbatches. Received: {rows} rows, microbatches={microbatches}. "
            f"Try microbatches={rows} or a batch size of at least {microbatches}."
        )


def checked_inputs(x: Any, model: keras.Model) -> list[tf.Tensor]:
    """The minibatch's inputs in the model's order, types and ranks. Raises ValueError where they cannot agree."""
    given = in_order(x, model)
    names = [tensor.name for tensor in model.inputs]
    if len(given) != len(names):
        raise ValueError(f"The model takes {len(names)} inputs. Received: x with {len(given)}. Try x as {names!r}.")
    return [_checked(value, expected) for value, expected in zip(given, model.inputs, strict=True)]


def _checked(value: Any, expected: Any) -> tf.Tensor:
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        raise ValueError(
            f"Inputs must be dense. Received: x of type {type(value).__name__}. Try tf.sparse.to_dense or to_tensor()."
        )
    tensor = adapted(tf.convert_to_tensor(value), expected)
    if not tf.TensorShape([None, *expected.shape[1:]]).is_compatible_with(tensor.shape):
        raise ValueError(
            f"The data do not fit the model. Received: x of shape {tuple(tensor.shape)} for {expected.name!r}. "
            f"Try shape {tuple(expected.shape)}."
        )
    return tensor


def check_microbatches(microbatches: Any, scheme: str | Scheme) -> None:
    """Refuse anything but None or a count, and several microbatches of a scheme that does not split minibatches."""
    if microbatches is not None and (
        isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1
    ):
        raise ValueError(f"A batch has at least one microbatch. Received: microbatches={microbatches!r}. Try 4.")
    chosen = scheme if isinstance(scheme, Scheme) else SCHEMES.get(scheme)
    if microbatches not in (None, 1) and not (chosen is not None and chosen.splits):
        splitting = [name for name, each in SCHEMES.items() if each.splits]
        raise ValueError(
            f"This scheme does not split a minibatch. Received: microbatches={microbatches!r}, "
            f"scheme={str(scheme)!r}. Try leaving it out, or one of: {', '.join(splitting)}."
        )


def check_recompute(recompute: bool, scheme: str) -> None:
    """Refuse to run forwards again where Keras keeps what it needs."""
    if recompute and scheme == DATA_PARALLEL:
        raise ValueError(
            f"Only stages run their forward again. Received: recompute={recompute!r}, scheme={scheme!r}. "
            "Try leaving it out, or scheme='single'."
        )


def check_cuts(cuts: Any, scheme: str) -> None:
    """Refuse cuts of the unsplit model."""
    if cuts is not None and scheme == "single":
        raise ValueError(
            f"The scheme 'single' has one stage. Received: cuts={cuts!r}, scheme={scheme!r}. Try leaving it out, or "
            "scheme='1f1b', whose result is that of the unsplit model."
        )


def check_schedule(scheme: Scheme, stages: int, microbatches: int) -> None:
    """Raise ScheduleError, a ValueError, for an order of actions that cannot run, and ValueError for halves of B."""
    check(scheme, stages, microbatches)
    devices, groups = scheme.schedule.devices(stages), groups_of(1, microbatches)
    actions = [each for device in range(devices) for each in scheme.schedule.order(device, devices, groups)]
    halves = next((each for each in actions if each.op not in ("F", "B")), None)
    if halves is not None:
        raise ValueError(
            f"Training carries out F and B; other operations can be planned and simulated. Received: {halves} in the "
            f"schedule of {scheme.name!r}. Try B where it has I and W, or FB."
        )


def checked_microbatches(microbatches: int | None, scheme: Scheme, stages: int) -> int:
    """How many microbatches a minibatch is split into. Raises ValueError for too few of them."""
    if not scheme.splits:
        return 1
    least = scheme.least_microbatches(stages)
    if microbatches is not None and microbatches < least:
        raise ValueError(
            f"{scheme.name!r} needs at least as many microbatches as there are stages but one: fewer do not give it "
            f"its weights in time. Received: microbatches={microbatches}, {stages} stages. Try microbatches={stages}."
        )
    return microbatches or max(DEFAULT_MICROBATCHES, stages if least > 1 else 1)


def _is_array(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "shape") and hasattr(value, "dtype")
