"""An optimizer's slots: by the variable that each belongs to, and the compiled optimizer with those of the stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import keras

from pipetrain.compute.functions.flat_values import WorkerCopies
from pipetrain.compute.keras_private import (
    LISTS,
    count_of,
    forget_weights,
    own_variables,
    rate_of,
    set_variables,
    track,
    weights_of,
)


class Slot(NamedTuple):
    """A variable that belongs to a weight, and its role: ``_momentums``, ``_velocities``, ..."""

    weight: keras.Variable
    kind: str
    variable: Any


def slots(optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]) -> Iterator[Slot]:
    """The slots of a built optimizer over as many variables as there are ``weights``, in their order.

    Keras' optimizers keep them in lists, one item (or None) for each variable.
    """
    known = {id(variable) for variable in optimizer.variables}
    for kind, items in sorted(vars(optimizer).items()):
        if isinstance(items, list) and len(items) == len(weights) and kind not in LISTS:
            for weight, item in zip(weights, items, strict=True):
                if id(item) in known:
                    yield Slot(weight, kind, item)


def shared(optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]) -> list[Any]:
    """The optimizer's variables that belong to no single weight, except its count of steps and learning rate."""
    others = {id(slot.variable) for slot in slots(optimizer, weights)}
    others |= {id(count_of(optimizer)), id(rate_of(optimizer))}
    return [variable for variable in optimizer.variables if id(variable) not in others]


Key = tuple[int, str]  # a weight, by its ``id``, and what a slot is of it


class OptimizerPart:
    """The slots of a built optimizer; they are looked up once, because they are read often.

    Args:
        optimizer: such as a stage's.
        weights: the model's own variables in place of those that it was built for.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]) -> None:
        self.optimizer, self.weights = optimizer, weights

    @cached_property
    def slots(self) -> dict[Key, Any]:
        """Its slots."""
        return {(id(slot.weight), slot.kind): slot.variable for slot in slots(self.optimizer, self.weights)}

    @cached_property
    def shared(self) -> list[Any]:
        """The state that does not belong to a single weight."""
        return shared(self.optimizer, self.weights)

    @cached_property
    def copies(self) -> WorkerCopies:
        """What its device has of others' slots."""
        return WorkerCopies(count_of(self.optimizer).value.device)


def adopt(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable], parts: Sequence[OptimizerPart]
) -> None:
    """Make the stages' slots for these weights the optimizer's own; their present values go to the stages.

    The optimizer then reads, saves and loads as if it had trained the unsplit model. For weights that it was built for
    and that are frozen since, it keeps its own slots. If the call is interrupted, nothing is changed: the optimizer
    keeps all its own slots.

    Args:
        optimizer: the compiled one, which may have been used elsewhere since.
        weights: all that the stages train, in the model's order.
        parts: of all replicas of all stages that have weights. The first that has a slot shares it; its values are
        copied to the others.
    """
    ours = _merged(parts)
    mine = OptimizerPart(optimizer, weights_of(optimizer))
    common = parts[0].shared if parts else []
    everything = with_frozen(weights, mine.weights)
    if [*map(id, mine.weights)] != [*map(id, everything)] or not _has(mine, ours):
        copy(mine, ours, common)
        trained = {*map(id, weights)}
        frozen = {key: variable for key, variable in mine.slots.items() if key[0] not in trained}
        _rebuild(optimizer, everything, frozen | ours, parts)
        mine = OptimizerPart(optimizer, everything)
    for part in parts[1:]:
        copy(mine, part.slots, part.shared, part.copies)


def with_frozen(weights: Sequence[keras.Variable], before: Sequence[keras.Variable]) -> list[keras.Variable]:
    """These weights and the former ones: in the former order if it has others too and all of these."""
    ids, known = {*map(id, weights)}, {*map(id, before)}
    if ids < known:
        return list(before)
    return [*weights, *(weight for weight in before if id(weight) not in ids)]


def _rebuild(
    optimizer: keras.optimizers.Optimizer,
    weights: Sequence[keras.Variable],
    held: dict[Key, Any],
    parts: Sequence[OptimizerPart],
) -> None:
    """Build the optimizer anew, for these weights, with the slots that are held and what the parts share."""
    common = parts[0].shared if parts else []
    with whole(optimizer), _handing_out(optimizer, held, parts):
        forget(optimizer)
        optimizer.build(list(weights))
        made = OptimizerPart(optimizer, weights)
        pairs = [(variable, held[key]) for key, variable in made.slots.items() if key in held]
        _replace(optimizer, [*pairs, *zip(made.shared, common, strict=True)])


def forget(optimizer: keras.optimizers.Optimizer) -> None:
    """Return the optimizer to its state before the first step, except for its count of steps and its learning rate."""
    attributes = vars(optimizer)
    for kind in {slot.kind for slot in slots(optimizer, weights_of(optimizer))}:
        del attributes[kind]
    forget_weights(optimizer)


def built(optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]) -> None:
    """Build the optimizer if it is not built; an interrupt leaves it unbuilt."""
    if not optimizer.built:
        with whole(optimizer):
            optimizer.build(list(weights))


@contextmanager
def whole(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Undo what is done within if it is not completed: Keras treats a partly built optimizer as built."""
    attributes, variables = dict(vars(optimizer)), own_variables(optimizer)
    try:
        yield
    except BaseException:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        set_variables(optimizer, variables)
        raise


@contextmanager
def _handing_out(
    optimizer: keras.optimizers.Optimizer, held: dict[Key, Any], parts: Sequence[OptimizerPart]
) -> Iterator[None]:
    """Within, the optimizer gets existing slots, its own or those of the parts, wherever it would make a new one.

    A second copy of all stages' slots on one device might not fit into its memory.
    """
    waiting: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # in the order in which they were made
    for (weight, _), variable in held.items():
        waiting[weight][id(variable)] = variable
    makers = [optimizer, *(part.optimizer for part in parts)]
    order = {id(variable): n for maker in makers for n, variable in enumerate(maker.variables)}
    queues = {weight: sorted(found.values(), key=lambda each: order[id(each)]) for weight, found in waiting.items()}
    make = optimizer.add_variable_from_reference

    def given(reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> Any:
        queue = queues.get(id(reference_variable))
        if not queue:
            return make(reference_variable, name, initializer)
        track(optimizer, queue[0])
        return queue.pop(0)

    vars(optimizer)["add_variable_from_reference"] = given
    try:
        yield
    finally:
        del vars(optimizer)["add_variable_from_reference"]


def _replace(optimizer: keras.optimizers.Optimizer, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Replace the first of each pair by the second in the optimizer, whatever way it made its slots in."""
    instead = {id(old): new for old, new in pairs if old is not new}
    variables = [instead.get(id(variable), variable) for variable in optimizer.variables]
    for name, value in list(vars(optimizer).items()):
        if isinstance(value, list) and name not in LISTS[:1] and any(id(item) in instead for item in value):
            setattr(optimizer, name, [instead.get(id(item), item) for item in value])
        elif id(value) in instead:
            setattr(optimizer, name, instead[id(value)])
    set_variables(optimizer, variables)


def _merged(parts: Sequence[OptimizerPart]) -> dict[Key, Any]:
    """The slots of all parts; where several have a slot, the first one's."""
    found: dict[Key, Any] = {}
    for part in parts:
        found = part.slots | found
    return found


def copy(
    source: OptimizerPart, slots: dict[Key, Any], shared: Sequence[Any], copies: WorkerCopies | None = None
) -> None:
    """Copy the values of the source's slots into these variables where they are different variables.

    ``copies`` are those of the device that these are on.
    """
    pairs = [(target, source.slots.get(key)) for key, target in slots.items()]
    different = [
        (target, variable)
        for target, variable in [*pairs, *zip(shared, source.shared, strict=False)]
        if variable is not None and target is not variable
    ]
    (copies or WorkerCopies("")).assign([each for each, _ in different], (each for _, each in different))


def _has(part: OptimizerPart, ours: dict[Key, Any]) -> bool:
    mine = part.slots
    return all(mine.get(key) is variable for key, variable in ours.items())
