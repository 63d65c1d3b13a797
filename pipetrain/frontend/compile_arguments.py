"""The arguments of Keras' own ``compile``, for a model whose class may have another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from pipetrain.compute.keras_private import compile_arguments, overridden
from pipetrain.frontend.attributes import known


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
