"""Which variables calls in different stages may have in common, and which stages have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.graph.inputs import memories
from pipetrain.compute.graph.segment import Call, Segment
from pipetrain.compute.keras_private import flat_layers, weights_of_layer


class Sharing(NamedTuple):
    """Weights that are trained and that the same stages have, ``holders``, in order."""

    holders: tuple[int, ...]
    weights: tuple[keras.Variable, ...]

    @property
    def first(self) -> int:
        """The first stage that has them."""
        return self.holders[0]


def sharing(stages: Sequence[Iterable[keras.Variable]]) -> list[Sharing]:
    """The weights that several stages have, from those of every stage; in the order of the stages."""
    holders: dict[int, list[int]] = {}
    weights: dict[int, keras.Variable] = {}
    for stage, variables in enumerate(stages):
        for variable in variables:
            weights[id(variable)] = variable
            holders.setdefault(id(variable), []).append(stage)
    groups: dict[tuple[int, ...], list[keras.Variable]] = {}
    for each, stages_of in holders.items():
        if len(stages_of) > 1:
            groups.setdefault(tuple(stages_of), []).append(weights[each])
    return [Sharing(stages_of, tuple(each)) for stages_of, each in groups.items()]


def with_unread(calls: Sequence[Call], symbols: Sequence[Any]) -> list[Call]:
    """The calls, each with the weights of its layer that only other calls read.

    Such are the two embeddings of a layer that embeds words in one call, and in another multiplies by a matrix of its
    own. Calls are traced that have weights in common with calls of another layer, or with other settings.
    """
    users: dict[int, list[int]] = {}
    for n, call in enumerate(calls):
        for weight in call.weights:
            users.setdefault(id(weight), []).append(n)
    kinds = [(id(call.operation), _settings(call)) for call in calls]
    asked = {n for those in users.values() if len({kinds[n] for n in those}) > 1 for n in those}
    read = {n: _read(calls[n], symbols) for n in asked}
    unread: dict[int, set[int]] = {n: set() for n in asked}
    for weight, those in users.items():
        if any(weight in read.get(n, {weight}) for n in those):  # else nobody's, and stays everybody's
            for n in asked.intersection(those):
                if weight not in read[n]:
                    unread[n].add(weight)
    return [call._replace(unread=frozenset(unread[n])) if n in asked else call for n, call in enumerate(calls)]


def _settings(call: Call) -> str:
    """The arguments of a call that are no tensors."""
    return str([each for each in keras.tree.flatten(call.node.arguments.kwargs) if not hasattr(each, "shape")])


class _Reading(keras.StatelessScope):
    """Sees which variables are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.read.add(id(variable))
        return super().get_current_value(variable)


def _read(call: Call, symbols: Sequence[Any]) -> set[int]:
    """The variables that a call reads; all of its layer's where it cannot be traced by itself."""
    segment = Segment.of_call(call, symbols)
    given = [tf.TensorSpec(symbols[value].shape, symbols[value].dtype) for value in segment.reads]
    reading = _Reading()
    try:
        with reading:
            tf.function(segment.values, autograph=False).get_concrete_function(given)
    except Exception:  # whatever a layer raises that is given ragged tensors, as a rule
        return {id(each) for each in call.weights}
    return reading.read


def shared_by_blocks(blocks: Sequence[Iterable[Any]]) -> list[list[tuple[int, keras.Variable]]]:
    """Of each block's calls, the trained weights that other blocks have too, each with its number."""
    trained = [{id(each): each for call in calls for each in call.weights} for calls in blocks]
    users = Counter(each for mine in trained for each in mine)
    numbers = {each: n for n, each in enumerate(each for each, count in users.items() if count > 1)}
    return [[(numbers[each], weight) for each, weight in mine.items() if each in numbers] for mine in trained]


def embeddings(model: keras.Model, variables: Sequence[Any]) -> set[int]:
    """The numbers of variables whose gradients are rows."""
    tables = [layer for layer in flat_layers(model) if isinstance(layer, keras.layers.Embedding)]
    found = {id(variable) for layer in tables for variable in layer.variables}
    return {n for n, each in enumerate(variables) if id(each) in found}


def state_variables(operation: Any) -> list[keras.Variable]:
    """The variables that a layer may change while it runs, which only one stage can have.

    Weights are none, trained or frozen. Neither are the seeds of random numbers: each stage draws its own.
    """
    if not isinstance(operation, keras.Layer):
        return []
    weights = {id(each) for each in weights_of_layer(operation)}
    own = [each for each in operation.variables if id(each) not in weights and not is_seed(each)]
    return [*own, *memories([operation])]


def is_seed(variable: keras.Variable) -> bool:
    """Whether this is the state of a generator of random numbers."""
    return bool(variable.path.endswith("seed_generator_state"))
