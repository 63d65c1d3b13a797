"""Refuses models that a pipeline would not train as Keras does."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.graph.blocks import Block
from pipetrain.compute.keras_private import HUB_LOOP, LOOP_METHODS, overridden
from pipetrain.frontend.checks.optimizer import WAITS
from pipetrain.frontend.keras_methods import REPLACED
from pipetrain.schemes.scheme import Scheme


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
