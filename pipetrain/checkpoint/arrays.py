"""What training needs to go on as if it had never stopped: weights, state, and the optimizers' slots, by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.graph.beside import beside
from pipetrain.compute.keras_private import count_of, global_seed
from pipetrain.compute.optimizer.loss_scaling import is_dynamic, stepping
from pipetrain.compute.optimizer.slots import Slot

Arrays = dict[str, np.ndarray]


def collected(model: keras.Model, slots: Iterable[Slot], shared: Iterable[Sequence[Any]]) -> Arrays:
    """Arrays by name: ``weight/N`` of the model's N-th variable, ``slot/N/KIND`` of its slots, ``shared/N``.

    ``beside/N`` are states of recurrent layers and, last, Keras' global seed if there is one.

    Nothing here depends on how the model is cut; of several replicas, and of what optimizers have in common, the first
    is taken.
    """
    numbers = {id(variable): n for n, variable in enumerate(model.variables)}
    arrays = {f"weight/{n}": array_of(variable) for n, variable in enumerate(model.variables)}
    arrays |= {f"beside/{n}": array_of(variable) for n, variable in enumerate(beside(model))}
    for slot in slots:
        key = f"slot/{numbers[id(slot.weight)]}/{slot.kind}"
        if key not in arrays:
            arrays[key] = array_of(slot.variable)
    first: Sequence[Any] = next(iter(shared), ())
    return arrays | {f"shared/{n}": array_of(variable) for n, variable in enumerate(first)}


def check_weights(model: keras.Model, arrays: Arrays, path: Path) -> None:
    """Raise ValueError where the arrays, of this file, are another model's."""
    here = [tuple(variable.shape) for variable in model.variables]
    there = [array.shape for array in numbered(arrays, "weight")]
    if here != there:
        different = next((n for n, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), None)
        what = f"{len(there)} variables for {len(here)}"
        if different is not None:
            what = f"shape {there[different]} for {model.variables[different].path!r} of shape {here[different]}"
        raise ValueError(
            f"The checkpoint is of another model. Received: {str(path)!r} with {what} of {model.name!r}. "
            "Try the model that it was made with, or another directory."
        )


def assign(model: keras.Model, arrays: Arrays, slots: Iterable[Slot], shared: Iterable[Sequence[Any]]) -> list[str]:
    """Put the arrays back where ``collected`` found them; gives the kinds of slots that were not among them."""
    numbers = {id(variable): n for n, variable in enumerate(model.variables)}
    for n, variable in enumerate(model.variables):
        variable.assign(arrays[f"weight/{n}"])
    state = numbered(arrays, "beside")
    if len(state) > len(beside(model)):
        global_seed()  # is made
    for variable, array in zip(beside(model), state, strict=False):  # older files have none
        _assign(variable, array)
    missing = set()
    for slot in slots:
        if not _assign(slot.variable, arrays.get(f"slot/{numbers[id(slot.weight)]}/{slot.kind}")):
            missing.add(slot.kind.strip("_"))
    for variables in shared:
        for n, variable in enumerate(variables):
            _assign(variable, arrays.get(f"shared/{n}"))
    return sorted(missing)


def not_finite(arrays: Arrays) -> set[str]:
    """The names of weights, and of optimizers' slots, that have a NaN or an infinity."""
    kept = {name: array for name, array in arrays.items() if name.startswith(("weight/", "slot/"))}
    return {name for name, array in kept.items() if array.dtype.kind == "f" and not np.isfinite(array).all()}


def scale_arrays(optimizer: keras.optimizers.Optimizer) -> Arrays:
    """Of an optimizer that scales the loss and may skip steps: ``loss_scale``, ``finite_steps`` and ``steps`` made."""
    return {name: array_of(variable) for name, variable in _of_scale(optimizer).items()}


def assign_scale(optimizer: keras.optimizers.Optimizer, arrays: Arrays, updates: int) -> None:
    """Put them back; without them, no step was skipped in as many ``updates``."""
    for name, variable in _of_scale(optimizer).items():
        value = arrays.get(name, np.asarray(updates) if name == "steps" else array_of(variable))
        variable.assign(tf.cast(value, variable.dtype))


def _of_scale(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    if not is_dynamic(optimizer):
        return {}
    steps = count_of(stepping(optimizer))
    return {"loss_scale": optimizer.dynamic_scale, "finite_steps": optimizer.step_counter, "steps": steps}


def array_of(variable: Any) -> np.ndarray:
    """A variable's value, in a type that NumPy can write: bfloat16 as float32, which holds it exactly."""
    value = tf.convert_to_tensor(variable)
    return (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()


def _assign(variable: Any, array: np.ndarray | None) -> bool:
    if array is None or tuple(variable.shape) != array.shape:
        return False
    variable.assign(tf.cast(array, variable.dtype))
    return True


def numbered(arrays: Arrays, kind: str) -> list[np.ndarray]:
    """The arrays ``KIND/0``, ``KIND/1``, ... in order."""
    keys = (key for key in arrays if key.startswith(f"{kind}/"))
    return [arrays[key] for key in sorted(keys, key=lambda key: int(key.split("/")[1]))]
