"""Every private name of Keras that the package uses, each behind a name of its own, and why no public one serves.

Nobody else touches them, so that a new version of Keras is met here. ``pyproject.toml`` bounds the versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

# What Keras' own callbacks remember, by the names of their attributes: they have no state to ask for.
CALLBACK_STATE = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "best_weights", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
}
# What ``compile`` leaves in a model: saving takes it from there.
COMPILED = ("compiled", "optimizer", "loss", "_compile_config", "_compile_loss", "_compile_metrics", "_loss_tracker")
LISTS = ("_variables", "_trainable_variables")  # an optimizer's lists that are no slots


def history(tensor: Any) -> tuple[Any, int, int]:
    """What made a symbolic tensor: operation, node, and which of its outputs. Public operations do not lead there."""
    operation, node_index, tensor_index = tensor._keras_history
    return operation, node_index, tensor_index


def call_node(operation: Any, index: int) -> Any:
    """One call of an operation, with its arguments."""
    return operation._inbound_nodes[index]


def mask_of(value: Any) -> Any:
    """The Keras mask that a tensor carries, or None; ``keras.src.backend.get_keras_mask`` is not public."""
    return getattr(value, "_keras_mask", None)


def set_mask(value: Any, mask: Any) -> None:
    """Make a tensor carry a Keras mask."""
    if mask is not None:
        value._keras_mask = mask


def is_ragged(symbol: Any) -> bool:
    """Whether a symbolic tensor is declared as ragged, which Keras before 3.10 does not know."""
    return bool(getattr(symbol, "ragged", False))


def is_own(kind: type) -> bool:
    """Whether a class is Keras' own, and no subclass of somebody else."""
    return kind.__module__.startswith("keras.src.")


def weights_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer has been built for."""
    return list(optimizer._trainable_variables) if optimizer.built else []


def rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """The learning rate itself, a variable or a schedule; the public property computes a schedule's present rate."""
    return getattr(optimizer, "_learning_rate", None)


def count_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """The variable that counts an optimizer's steps, whatever wraps the optimizer."""
    return optimizer._iterations


def first_moments(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Adam's first moments, and RMSprop's velocities."""
    moments: list[Any] = optimizer._momentums
    return moments


def second_moments(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Adam's second moments, the largest so far with AMSGrad."""
    moments: list[Any] = optimizer._velocity_hats if optimizer.amsgrad else optimizer._velocities
    return moments


def decays(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether weight decay is for this variable: ``exclude_from_weight_decay`` only sets it."""
    return bool(optimizer._use_weight_decay(variable))


def copy_exclusions(
    source: keras.optimizers.Optimizer,
    target: keras.optimizers.Optimizer,
    originals: Sequence[keras.Variable],
    copies: Sequence[keras.Variable],
) -> None:
    """Exclude from the target's weight decay what is excluded from the source's: no part of the settings."""
    excluded = getattr(source, "_exclude_from_weight_decay", None)
    if excluded is None:
        return
    names = source._exclude_from_weight_decay_pattern
    target.exclude_from_weight_decay(
        [mine for mine, theirs in zip(copies, originals, strict=True) if source._var_key(theirs) in excluded],
        [names.pattern] if names else None,
    )


def index_of(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> int:
    """Which of the optimizer's variables this is, for an ``update_step`` of one's own."""
    index: int = optimizer._get_variable_index(variable)
    return index


def track(optimizer: keras.optimizers.Optimizer, variable: Any) -> None:
    """Count a variable among the optimizer's: the public way makes a new one."""
    optimizer._track_variable(variable)


def forget_weights(optimizer: keras.optimizers.Optimizer) -> None:
    """Let an optimizer be as before ``build``, but for slots that the caller has taken away."""
    attributes = vars(optimizer)
    kept = {id(optimizer._iterations), id(optimizer._learning_rate)}
    set_variables(optimizer, [variable for variable in optimizer.variables if id(variable) in kept])
    attributes["_trainable_variables"], attributes["_trainable_variables_indices"] = [], {}
    optimizer.built = False


def set_variables(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
    """These are its variables. A list that has been changed, TensorFlow would not save: they are in a new one."""
    attributes = vars(optimizer)
    tracker = attributes.pop("_tracker")  # which would add all variables of a list to the optimizer's
    try:
        if [*map(id, optimizer._variables)] != [*map(id, variables)]:
            optimizer._variables = list(variables)
    finally:
        attributes["_tracker"] = tracker
    tracker.config["variables"] = tracker.config["variables"][0], optimizer._variables
    tracker.stored_ids["variables"] = {id(variable) for variable in variables}


def tracked_ids(each: Any) -> list[Any]:
    """The sets by which an object of Keras knows what it tracks."""
    return [*each._tracker.stored_ids.values()] if hasattr(each, "_tracker") else []


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """The epoch with which ``fit``, already begun, begins; None: the one that it was given."""
    model._initial_epoch = epoch


def steps_of(epoch_iterator: Any) -> Callable[[], Iterator[Any]]:
    """What gives an epoch's steps, as ``fit`` asks for them."""
    found: Callable[[], Iterator[Any]] = epoch_iterator._enumerate_iterator
    return found


def set_steps(epoch_iterator: Any, steps: Callable[[], Iterator[Any]] | None) -> None:
    """Give an epoch's steps in a way of one's own; None: in Keras' own again."""
    if steps is None:
        del epoch_iterator._enumerate_iterator
    else:
        epoch_iterator._enumerate_iterator = steps
