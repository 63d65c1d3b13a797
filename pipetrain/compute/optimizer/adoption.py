"""A compiled optimizer whose slots are the stages' own variables: whoever reads or sets them, there are no others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.keras_private import LISTS, forget_weights, set_variables, track, weights_of
from pipetrain.compute.optimizer.slots import shared, slots

Key = tuple[int, str]  # a weight, by its ``id``, and what a slot is of it


class Part:
    """What a built optimizer has gathered; looked up once, for a stage's, which stays as it is, is asked for often.

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
        """What it has gathered that is of no single weight."""
        return shared(self.optimizer, self.weights)


def adopt(optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable], parts: Sequence[Part]) -> None:
    """Let the optimizer's slots for these weights be the stages'; what it has gathered for them goes to the stages.

    So it reads, saves and loads as one that has trained the model alone. For weights that it was built for, and that no
    stage trains because they are frozen by now, it keeps its own slots. Either all of this happens or nothing: the
    optimizer keeps its own slots if it is interrupted.

    Args:
        optimizer: the compiled one, which may have been used elsewhere meanwhile.
        weights: all that the stages train, in the model's order.
        parts: of all replicas of all stages that have weights. The first that has a slot shares it, others follow.
    """
    ours = _merged(parts)
    mine = Part(optimizer, weights_of(optimizer))
    common = parts[0].shared if parts else []
    everything = with_frozen(weights, mine.weights)
    if [*map(id, mine.weights)] != [*map(id, everything)] or not _has(mine, ours):
        copy(mine, ours, common)
        trained = {*map(id, weights)}
        frozen = {key: variable for key, variable in mine.slots.items() if key[0] not in trained}
        _rebuild(optimizer, everything, frozen | ours, parts)
        mine = Part(optimizer, everything)
    for part in parts[1:]:
        copy(mine, part.slots, part.shared)


def with_frozen(weights: Sequence[keras.Variable], before: Sequence[keras.Variable]) -> list[keras.Variable]:
    """These weights and those of before, in the order of before if it has others too, and all of these."""
    ids, known = {*map(id, weights)}, {*map(id, before)}
    if ids < known:
        return list(before)
    return [*weights, *(weight for weight in before if id(weight) not in ids)]


def _rebuild(
    optimizer: keras.optimizers.Optimizer,
    weights: Sequence[keras.Variable],
    held: dict[Key, Any],
    parts: Sequence[Part],
) -> None:
    """Build the optimizer anew, for these weights, with the slots that are held and what the parts share."""
    common = parts[0].shared if parts else []
    with _whole(optimizer), _handing_out(optimizer, held, parts):
        forget(optimizer)
        optimizer.build(list(weights))
        made = Part(optimizer, weights)
        pairs = [(variable, held[key]) for key, variable in made.slots.items() if key in held]
        _replace(optimizer, [*pairs, *zip(made.shared, common, strict=True)])


def forget(optimizer: keras.optimizers.Optimizer) -> None:
    """Let the optimizer be as before its first step, but for its count of steps and its learning rate."""
    attributes = vars(optimizer)
    for kind in {slot.kind for slot in slots(optimizer, weights_of(optimizer))}:
        del attributes[kind]
    forget_weights(optimizer)


def built(optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]) -> None:
    """Build it, if it is not, wholly or not at all."""
    if not optimizer.built:
        with _whole(optimizer):
            optimizer.build(list(weights))


@contextmanager
def _whole(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """What is done within is undone if it does not come to its end: half built counts as built for Keras."""
    attributes, variables = dict(vars(optimizer)), list(optimizer.variables)
    try:
        yield
    except BaseException:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        set_variables(optimizer, variables)
        raise


@contextmanager
def _handing_out(optimizer: keras.optimizers.Optimizer, held: dict[Key, Any], parts: Sequence[Part]) -> Iterator[None]:
    """Meanwhile a slot that the optimizer would make is one that is held, its own by now or one of the parts'.

    The stages' slots, all made once more in one place, might not fit there.
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
    """Put the second of each pair where the optimizer has the first: optimizers may make slots in ways of their own."""
    instead = {id(old): new for old, new in pairs if old is not new}
    variables = [instead.get(id(variable), variable) for variable in optimizer.variables]
    for name, value in list(vars(optimizer).items()):
        if isinstance(value, list) and name not in LISTS[:1] and any(id(item) in instead for item in value):
            setattr(optimizer, name, [instead.get(id(item), item) for item in value])
        elif id(value) in instead:
            setattr(optimizer, name, instead[id(value)])
    set_variables(optimizer, variables)


def _merged(parts: Sequence[Part]) -> dict[Key, Any]:
    """Of all parts, the first's wherever several have a slot."""
    found: dict[Key, Any] = {}
    for part in parts:
        found = part.slots | found
    return found


def copy(source: Part, slots: dict[Key, Any], shared: Sequence[Any]) -> None:
    """What the source has gathered, into these variables where they are others."""
    pairs = [(target, source.slots.get(key)) for key, target in slots.items()]
    for target, variable in [*pairs, *zip(shared, source.shared, strict=False)]:
        if variable is not None and target is not variable:
            target.assign(tf.convert_to_tensor(variable))


def _has(part: Part, ours: dict[Key, Any]) -> bool:
    mine = part.slots
    return all(mine.get(key) is variable for key, variable in ours.items())
