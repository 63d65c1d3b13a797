"""The arguments of Keras' own ``compile``, for a model whose class may have another one."""

from __future__ import annotations

from typing import Any

import keras

from pipetrain.compute.keras_private import compile_arguments, overridden
from pipetrain.frontend.attributes import known

OPEN = ("jit_compile", "steps_per_execution")  # Keras' value of which is no wish, if nothing was given


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
    kept = {name: given[name] for name in (*OPEN, "auto_scale_loss") if name in given}
    return {name: value for name, value in made.items() if name not in OPEN} | kept


def arguments_of(model: keras.Model) -> dict[str, Any]:
    """Those with which a compiled model goes on as it is, with its very optimizer; XLA is for profiles to decide on."""
    made = {name: value for name, value in known(compile_arguments(model)).items() if name not in OPEN}
    steps = {"steps_per_execution": model.steps_per_execution} if model.steps_per_execution != 1 else {}
    return made | steps | {"optimizer": model.optimizer, "auto_scale_loss": False}
