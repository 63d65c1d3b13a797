"""Models, optimizers, callbacks and ways of running Keras' loop that training by stages does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.graph.blocks import Block
from pipetrain.compute.graph.sharing import embeddings
from pipetrain.compute.keras_private import HUB_LOOP, LOOP_METHODS, count_of, overridden
from pipetrain.compute.optimizer.clone import NEVER, check_compensable, clone, momenta, not_cloned, whole_step
from pipetrain.compute.optimizer.gradient_scaling import is_dynamic, stepping
from pipetrain.compute.optimizer.update import overwrites
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.compression import Compression
from pipetrain.schemes.scheme import Scheme

_LOSS = "the loss in compile"
_METRICS = "metrics in compile, or compute_metrics"
_CALLBACK = "a callback of fit"
_VARIABLES = "layer.trainable = False for those that are not to be trained"
# What Keras' loop asks of a model and a PipelineModel of itself: a model whose class overrides one of these is refused.
REPLACED = {
    "compiled_loss": _LOSS,
    "compiled_metrics": _METRICS,
    "compute_loss": _LOSS,
    "distribute_strategy": "devices=",
    "evaluate": _CALLBACK,
    "fit": _CALLBACK,
    "losses": "add_loss in a layer",
    "make_predict_function": "predict_step",
    "make_test_function": _METRICS,
    "make_train_function": _LOSS,
    "metrics_variables": "metrics",
    "non_trainable_variables": _VARIABLES,
    "non_trainable_weights": _VARIABLES,
    "test_on_batch": _CALLBACK,
    "test_step": _METRICS,
    "train_on_batch": _CALLBACK,
    "train_step": _LOSS,
    "trainable": _VARIABLES,
    "trainable_variables": _VARIABLES,
    "trainable_weights": _VARIABLES,
    "variables": _VARIABLES,
    "weights": _VARIABLES,
}


def check_loop(run_eagerly: bool, steps_per_execution: int) -> None:
    """Refuse ways of running a step that a pipeline does not have."""
    if run_eagerly:
        raise ValueError("Stages run as TensorFlow functions. Received: run_eagerly=True. Try run_eagerly=False.")
    if steps_per_execution != 1:
        raise ValueError(
            "Keras' loop gives the pipeline minibatches one by one. Received: "
            f"steps_per_execution={steps_per_execution}, set after compile. Try it as an argument of compile."
        )


def checked_steps(steps_per_execution: Any) -> int | None:
    """How many minibatches a call is to have, None if that is not asked. Raises ValueError for what is no number."""
    if steps_per_execution is None:
        return None
    problem = "The minibatches of a call are a whole number of at least 1"
    return checked_count("steps_per_execution", steps_per_execution, problem, 1)


def check_callbacks(callbacks: Sequence[Any], optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse the callback that swaps weights with averages of them, where none are kept."""
    swaps = any(isinstance(each, keras.callbacks.SwapEMAWeights) for each in callbacks)
    if swaps and not optimizer.use_ema:
        raise ValueError(
            "There are no averages of weights to swap with. Received: callbacks with SwapEMAWeights, "
            f"optimizer={type(optimizer).__name__}(use_ema=False). Try an optimizer with use_ema=True."
        )


def check_backup(callbacks: Sequence[Any], scheme: str, beside_slots: Callable[[], Sequence[str]]) -> None:
    """Refuse Keras' backup where training needs more to go on than a Keras file holds: ``beside_slots``."""
    backs_up = any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks)
    if backs_up and (left_out := beside_slots()):
        raise ValueError(
            f"Training would not go on as it was: to predict weights or to send less, {scheme!r} remembers more of the "
            "last steps than a Keras file holds. Received: callbacks with BackupAndRestore, which leaves out "
            f"{[*left_out]}. "
            "Try pipetrain.callbacks.PipelineCheckpoint."
        )


WAITS = "a stage would have to wait for all stages to know whether every gradient of a minibatch is finite"


def check_optimizer_kind(optimizer: Any) -> None:
    """Refuse, by name, optimizers that hold others, except for one that scales the loss."""
    steps = stepping(optimizer)
    name = type(steps).__name__
    if is_dynamic(steps):
        raise ValueError(f"One optimizer scales the loss. Received: {name} in {name}. Try the inner one.")
    if hasattr(steps, "optimizers"):
        raise ValueError(f"One optimizer trains all layers. Received: optimizer={name}. Try a single one.")


def check_loss_scaling(optimizer: Any, scheme: str, chosen: Scheme | None) -> None:
    """Refuse dynamic loss scaling where a step cannot be skipped. ``chosen`` as for ``check_optimizer``."""
    if is_dynamic(optimizer) and (chosen is None or chosen.asynchronous):
        why = "each device would need a copy of the scale" if chosen is None else WAITS
        raise ValueError(
            f"Dynamic loss scaling is not supported here: {why}. Received: scheme={scheme!r}, "
            f"optimizer={type(optimizer).__name__}, in which Keras wraps others under the policy 'mixed_float16'. "
            "Try the policy 'mixed_bfloat16', or a synchronous scheme: 'gpipe' or '1f1b'."
        )


def check_votes(
    compression: Compression | None, argument: str, optimizer: keras.optimizers.Optimizer, model: keras.Model
) -> None:
    """Refuse a majority of signs for scaled gradients, and for embeddings; ``argument`` is what compresses."""
    if compression is None or not compression.majority:
        return
    if (factor := stepping(optimizer).loss_scale_factor or 1.0) != 1.0:
        raise ValueError(
            "A majority of signs has no scale by which it could be divided. Received: "
            f"{argument}={str(compression)!r}, loss_scale_factor={factor}. Try loss_scale_factor=None."
        )
    weights = model.trainable_variables
    if found := embeddings(model, weights):
        raise ValueError(
            "A bit cannot say that a minibatch does not have a word, whose weights would move. Received: "
            f"{argument}={str(compression)!r}, embeddings {[weights[n].path for n in sorted(found)]}. "
            f"Try {compression.name!r}."
        )


def check_optimizer(optimizer: keras.optimizers.Optimizer, scheme: str, chosen: Scheme | None, stages: int) -> None:
    """Refuse, by name, what one clone of the optimizer per stage, or per device, or the scheme, would get wrong.

    ``chosen`` is the scheme of this name, None for data-parallel.
    """
    if chosen is not None:
        check_loss_scaling(optimizer, scheme, chosen)
        _check_overrides(optimizer, scheme, chosen, stages)
    optimizer = stepping(optimizer)
    name = type(optimizer).__name__
    apart = chosen is not None and stages > 1 and chosen.asynchronous
    refused = {
        "global_clipnorm": (
            apart,
            "the stages update at different times: to wait for the norm of all would stop the pipeline, and the norm "
            "of an earlier minibatch, which is known, does not bound this one's gradients",
            "clipnorm, clipvalue, or a synchronous scheme: 'gpipe' or '1f1b'",
        ),
    }
    for setting, (applies, why, remedy) in refused.items():
        if applies and getattr(optimizer, setting, None):
            received = f"scheme={scheme!r}, optimizer={name}({setting}={getattr(optimizer, setting)})"
            raise ValueError(f"{setting} is not supported here: {why}. Received: {received}. Try {remedy}.")
    _check_some_steps(optimizer, scheme, chosen)
    if chosen is not None and chosen.spikes:
        check_compensable(optimizer)
    if chosen is not None and chosen.stretches and not momenta(optimizer):
        raise ValueError(
            f"The optimizer has no momentum that is known, and that could be stretched. Received: optimizer={name}, "
            "stretch_momentum=True. Try keras.optimizers.SGD(..., momentum=0.9), or stretch_momentum='auto'."
        )


def _check_overrides(optimizer: keras.optimizers.Optimizer, scheme: str, chosen: Scheme, stages: int) -> None:
    """Refuse what clones of the optimizer do not do as it would itself."""
    steps = stepping(optimizer)
    name = type(steps).__name__
    if never := overridden(steps, NEVER):
        raise ValueError(
            f"The last stage scales its loss by loss_scale_factor alone. Received: optimizer={name}, whose class "
            f"overrides {never[0]}. Try {name}(loss_scale_factor=...), or the factor in the loss."
        )
    with tf.device(None):
        _check_cloned(steps)
    if chosen.rescale_steps and overridden(steps, ["learning_rate"]):
        raise ValueError(
            f"The learning rate is the optimizer's own. Received: optimizer={name}, whose class overrides "
            "learning_rate, rescale_steps. Try a schedule."
        )
    if not (whole := whole_step(steps)):
        return
    if stages > 1:
        check_whole(steps, scheme, f"{stages} stages, each with a clone of the optimizer for its own weights")
    scaled = is_dynamic(optimizer) or steps.loss_scale_factor or steps.global_clipnorm
    if scaled:
        raise ValueError(
            "Here gradients are unscaled, and clipped by their norm, before the optimizer is given them, not within. "
            f"Received: optimizer={name}, whose class overrides {whole[0]}, with loss scaling or global_clipnorm. Try "
            "it without these, or an optimizer that overrides update_step alone."
        )


def check_whole(optimizer: keras.optimizers.Optimizer, scheme: str, why: str) -> None:
    """Refuse a class that looks at all gradients of a step, where no clone is given them all."""
    if methods := whole_step(stepping(optimizer)):
        name = type(stepping(optimizer)).__name__
        raise ValueError(
            f"No optimizer here is given all gradients of a step: there are {why}. Received: scheme={scheme!r}, "
            f"optimizer={name}, whose class overrides {methods[0]}. Try overriding update_step, which is given one "
            "weight's; or scheme='all-reduce' or 'single'."
        )


def _check_cloned(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse an optimizer that its class cannot make again from its config."""
    name = type(optimizer).__name__
    try:
        copy = clone(optimizer, [], [])
    except TypeError as error:
        raise TypeError(
            f"Every stage has a clone of the optimizer, which its class makes of its config. Received: "
            f"optimizer={name}, for which that fails: {error}. Try {name}.get_config with all its arguments."
        ) from error
    if different := [*not_cloned(optimizer, copy)]:
        raise ValueError(
            f"Every stage has a clone of the optimizer, which its class makes of its config. Received: "
            f"optimizer={name}, of which that leaves out {', '.join(different)}. Try {name}.get_config with all its "
            "arguments, and methods of a class rather than of the object."
        )


def _check_some_steps(optimizer: keras.optimizers.Optimizer, scheme: str, chosen: Scheme | None) -> None:
    """Refuse what happens at some steps only, where each step counts, or where no step may depend on a condition."""
    every, overwriting = "gradient_accumulation_steps", "ema_overwrite_frequency"
    accumulates, mirrored = (
        bool(getattr(optimizer, every)),
        "MirroredStrategy takes no step that depends on a condition",
    )
    corrects = chosen is not None and (chosen.spikes or chosen.rescale_steps)
    clips = chosen is not None and optimizer.global_clipnorm
    refused = [
        (every, accumulates and chosen is None, mirrored, "a larger batch size, or another scheme"),
        (every, accumulates and corrects, "gradients of different staleness are summed", "no correction for staleness"),
        (
            every,
            accumulates and chosen is not None and chosen.fits,
            "the multiple of the velocity would be fitted over minibatches that do not update",
            "another horizon than 'fitted'",
        ),
        (every, accumulates and clips, "global_clipnorm is of one minibatch's gradients", "clipnorm or clipvalue"),
        (overwriting, overwrites(optimizer) and chosen is None, mirrored, "without it, or another scheme"),
        (
            overwriting,
            overwrites(optimizer) and chosen is not None and chosen.policy.predicts,
            "the velocity does not predict weights that averages replace",
            "without it, or a scheme that does not predict",
        ),
    ]
    for setting, applies, why, remedy in refused:
        if applies:
            received = (
                f"scheme={scheme!r}, optimizer={type(optimizer).__name__}({setting}={getattr(optimizer, setting)})"
            )
            raise ValueError(f"{setting} is not supported here: {why}. Received: {received}. Try {remedy}.")


def check_own(built_for: Sequence[Any], variables: Sequence[Any], optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse an optimizer that is built for variables that are not the model's: its slots would be lost."""
    if not {id(each) for each in built_for} <= {id(each) for each in variables}:
        name, steps = type(optimizer).__name__, int(count_of(optimizer).numpy())
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


def check_model(model: keras.Model) -> None:
    """Refuse a model that changes how it is trained or evaluated: a pipeline would not."""
    for method in overridden(model, [*REPLACED, *LOOP_METHODS], HUB_LOOP):
        raise TypeError(
            f"A pipeline has its own training step. Received: model={model.name!r}, whose class "
            f"{type(model).__name__} overrides {method}. Try a model without it, and instead "
            f"{REPLACED.get(method, 'a layer, a loss or a metric of your own')}."
        )


def check_precision(blocks: Sequence[Block], scheme: Scheme) -> None:
    """Refuse layers that need loss scaling, which the stages of an asynchronous scheme do not have."""
    for call in (call for block in blocks for call in block.calls) if scheme.asynchronous else ():
        policy = getattr(call.operation, "dtype_policy", None)
        if policy is not None and policy.compute_dtype == "float16":
            raise ValueError(
                f"float16 needs loss scaling, for which {WAITS}. Received: scheme={scheme.name!r}, layer "
                f"{call.name!r} with dtype policy {policy.name!r}. Try the policy 'mixed_bfloat16', or a synchronous "
                "scheme: 'gpipe' or '1f1b'."
            )


def check_assignments(stages: Sequence[Stage], scheme: Scheme) -> None:
    """Refuse layers that assign to trained weights where other versions of these, or other copies, are in use.

    ``stages`` have been traced.
    """
    for stage in stages:
        shared = {id(each) for group in stage.shared for each in group.originals}
        for variable in stage.changed:
            if scheme.asynchronous or id(variable) in shared:
                why = (
                    "its forwards read versions of the weights that later updates do not begin with"
                    if scheme.asynchronous
                    else "other stages have copies of it"
                )
                raise ValueError(
                    f"A layer assigns, while it runs, to a weight that is trained, as SpectralNormalization does, and "
                    f"{why}. Received: scheme={scheme.name!r}, variable {variable.path!r} of shape "
                    f"{tuple(variable.shape)}. Try a synchronous scheme, 'gpipe' or '1f1b', with all calls of the "
                    "layer in one stage."
                )
