"""What ``keras.Optimizer`` lets a class override, where every stage or device has a clone for its own weights.

A Keras method is in one of these tables; ``tests/fit/test_keras_methods.py`` goes through all that Keras has.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isroutine

import keras

from pipetrain.compute.keras_private import WHOLE_STEP, overridden, rate_of

# A clone has these too, for its own weights.
PER_WEIGHT = (
    *("add_optimizer_variables", "add_variable", "add_variable_from_reference", "assign", "assign_add", "assign_sub"),
    *("build", "from_config", "get_config", "iterations", "learning_rate", "update_step"),
)
# Are given all gradients of a step: a clone has them where it has all weights.
WHOLE = ("apply", "apply_gradients", *WHOLE_STEP)
# Keras, or a program, calls these of the compiled optimizer itself, which has the slots of all clones.
OF_COMPILED = (
    *("exclude_from_weight_decay", "finalize_variable_values", "load_own_variables", "save_own_variables"),
    *("set_weights", "variables"),
)
UNASKED = ("stateless_apply",)  # is not called where TensorFlow computes
NEVER = ("scale_loss",)  # the last stage scales its loss by ``loss_scale_factor``


def whole_step(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """The methods of a class of the user's that look at all gradients of a step at once."""
    return overridden(optimizer, WHOLE)


def not_cloned(optimizer: keras.optimizers.Optimizer, copy: keras.optimizers.Optimizer) -> Iterator[str]:
    """The attributes of an optimizer that a copy made by its class and config has not: settings, and own functions.

    Variables, and what is made of them, are no settings; nor is what it remembers, once built, under private names.
    """
    theirs, no_setting = vars(copy), object()
    for name, value in vars(optimizer).items():
        is_setting = value is None or isroutine(value) or isinstance(value, bool | int | float | str)
        is_memory = name in ("built", "name") or (name.startswith("_") and optimizer.built)
        if is_setting and not is_memory and rate_of(optimizer) is not value:
            copied = theirs.get(name, no_setting)
            if value is not copied and value != copied:
                yield name
