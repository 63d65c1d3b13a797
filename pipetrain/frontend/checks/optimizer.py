"""Refuses optimizers that one clone per stage, or per device, would get wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from pipetrain.compute.optimizer.spikes import check_compensable
from pipetrain.compute.optimizer.velocity import check_predictable
from pipetrain.schemes.scheme import Scheme


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
