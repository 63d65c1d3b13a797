"""A Keras model as a chain of blocks: its layer calls in the order they run, and what crosses every cut."""

from __future__ import annotations

import graphlib
import heapq
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.graph.composite import composites
from pipetrain.compute.graph.segment import Call, Segment, is_differentiable
from pipetrain.compute.keras_private import call_node, history


class Block(NamedTuple):
    """The smallest piece that a cut can separate: one layer call, or several that must stay together.

    ``name`` is that of its last layer; where another block before it has the same, ``":2"`` and so on follow.
    ``composite`` are the layers whose outputs are ragged or sparse, each with which of the two it is.
    """

    name: str
    calls: tuple[Call, ...]
    composite: tuple[tuple[str, str], ...] = ()


class Chain:
    """A model's blocks in an order in which they can run, and the values that they hand on.

    A value is known by its number. A cut may fall between any two blocks; everything made or given before it and
    needed after it crosses, the model's inputs and outputs included.

    Args:
        model: a Sequential or Functional model. Models nested in it are opened.

    Raises:
        TypeError: for a subclassed model, whose layer calls Keras does not record.
        ValueError: for a Sequential model without input shape.
    """

    def __init__(self, model: keras.Model) -> None:
        _check_graph(model)
        self.model = model
        walk = _Walk()
        self._inputs = [walk.new_value(tensor) for tensor in model.inputs]
        self._outputs = walk.through(model, self._inputs, "")
        self._symbols = walk.symbols
        composite = composites(walk.calls, walk.symbols)
        _check_outputs(model, [composite.get(value) for value in self._outputs])
        self.blocks = _named(_grouped(walk.calls, composite), composite)
        # The first and the last cut that each value may cross.
        self._first, self._last = [0] * len(self._symbols), [0] * len(self._symbols)
        for index, block in enumerate(self.blocks):
            for call in block.calls:
                for value in call.reads:
                    self._last[value] = index
                for value in call.writes:
                    self._first[value] = index + 1
        for value in self._outputs:
            self._last[value] = len(self.blocks)

    def crossing(self, end: int) -> list[int]:
        """Values that cross the cut before block ``end``; the model's inputs at 0, its outputs at the end."""
        if end == 0:
            return self._inputs
        if end == len(self.blocks):
            return self._outputs
        return [value for value, last in enumerate(self._last) if self._first[value] <= end <= last]

    def specs(self, end: int) -> list[Any]:
        """The symbolic tensors of ``crossing(end)``."""
        return [self._symbols[value] for value in self.crossing(end)]

    def segment(self, first: int, end: int) -> Segment:
        """Blocks ``first`` to ``end - 1`` as one layer, from what crosses into them to what crosses out.

        Raises ValueError for numbers that cross out in a type of which TensorFlow makes no gradients.
        """
        if end < len(self.blocks):
            _check_types(self.specs(end), self.blocks[end - 1].name)
        calls = list(self._calls(first, end))
        return self._segment(calls, self.crossing(first), self.crossing(end), self._trained())

    def alone(self) -> Iterator[Segment]:
        """Every block as a layer of its own, without what only passes by."""
        trained = self._trained()
        for index, block in enumerate(self.blocks):
            reads = {value for call in block.calls for value in call.reads}
            writes = {value for call in block.calls for value in call.writes}
            out = [value for value in self.crossing(index + 1) if value in writes]
            yield self._segment(block.calls, sorted(reads - writes), out, trained)

    def pack(self, outputs: Sequence[Any]) -> Any:
        """The model's outputs in the structure that calling it gives."""
        structure = outputs if isinstance(self.model, keras.Sequential) else self.model.output
        if len(outputs) == 1 and isinstance(structure, list | tuple):
            return outputs[0]
        return keras.tree.pack_sequence_as(structure, list(outputs))

    def _calls(self, first: int, end: int) -> Iterator[Call]:
        return (call for block in self.blocks[first:end] for call in block.calls)

    def _segment(self, calls: Sequence[Call], reads: list[int], writes: list[int], trained: set[int]) -> Segment:
        differentiable, returns = ([value in trained for value in values] for values in (reads, writes))
        return Segment(calls, reads, writes, self._symbols, differentiable, returns)

    def _trained(self) -> set[int]:
        """Values that want a gradient: those of types with one that trainable weights had a part in."""
        trained: set[int] = set()
        for call in self._calls(0, len(self.blocks)):
            if getattr(call.operation, "trainable_variables", None) or not trained.isdisjoint(call.reads):
                trained.update(value for value in call.writes if is_differentiable(self._symbols[value].dtype))
        return trained


def _check_outputs(model: keras.Model, composite: Sequence[str | None]) -> None:
    for tensor, kind in zip(model.outputs, composite, strict=True):
        if kind is not None:
            operation = history(tensor)[0].name
            raise ValueError(
                f"An output of a model that is cut must be dense. Received: model={model.name!r}, whose output from "
                f"{operation!r} is {kind}. Try {'to_tensor()' if kind == 'ragged' else 'tf.sparse.to_dense'} after it."
            )


def _check_types(crossing: Sequence[Any], name: str) -> None:
    for tensor in crossing:
        if tf.as_dtype(tensor.dtype).is_floating and not is_differentiable(tensor.dtype):
            raise ValueError(
                f"No gradient crosses a cut in the type {tensor.dtype}. Received: a cut after {name!r}, which "
                f"{tensor.name!r} crosses. Try a cut before or after what works in that type."
            )


def _check_graph(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(f"Not a Keras model. Received: model={model!r}. Try a keras.Sequential or Functional model.")
    if isinstance(model, keras.Sequential) and not model.built:
        raise ValueError(
            f"The Sequential {model.name!r} has no input shape yet. Try keras.Input(...) as its first layer."
        )
    if not _is_graph(model):
        raise TypeError(
            f"Cannot see the layers of a subclassed model. Received: model={model.name!r} ({type(model).__name__}). "
            "Try a Functional model: keras.Model(inputs, outputs). Called on a keras.Input inside one, "
            f"{type(model).__name__} becomes one block of it, which stays whole."
        )


def _is_graph(operation: Any) -> bool:
    """Whether this is a Sequential or Functional model that runs as Keras wrote it: its calls are known."""
    if not isinstance(operation, keras.Model) or not type(operation).call.__module__.startswith("keras.src.models"):
        return False
    try:
        return bool(operation.outputs)
    except AttributeError:
        return False


class _Walk:
    """Collects a model's calls in Keras' own order, nested models opened."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.symbols: list[Any] = []

    def new_value(self, tensor: Any) -> int:
        """A number for the value of a symbolic tensor."""
        self.symbols.append(tensor)
        return len(self.symbols) - 1

    def through(self, model: Any, inputs: Sequence[int], path: str) -> list[int]:
        """Append the calls of ``model`` on these values; gives the values of its outputs."""
        known = dict(zip(map(id, model.inputs), inputs, strict=True))
        for operation, node in _in_order(model):
            name = path + operation.name
            given = _nested_inputs(operation, node) if _is_graph(operation) else None
            if given is not None:
                made = self.through(operation, [known[id(tensor)] for tensor in given], f"{name}/")
            else:
                made = [self.new_value(tensor) for tensor in node.output_tensors]
                reads = tuple(known[id(tensor)] for tensor in node.input_tensors)
                self.calls.append(Call(name, operation, node, reads, tuple(made)))
            known.update(zip(map(id, node.output_tensors), made, strict=True))
        return [known[id(tensor)] for tensor in model.outputs]


def _in_order(model: Any) -> Iterator[tuple[Any, Any]]:
    """The calls that the outputs need, in the order of Keras' list of operations as far as it can be kept."""
    operations = model.layers if isinstance(model, keras.Sequential) else model.operations
    rank = {id(operation): index for index, operation in enumerate(operations)}
    unlisted = count(-1, -1)  # operations that a Sequential model does not list, such as those that make masks
    inputs = {id(tensor) for tensor in model.inputs}
    nodes: dict[tuple[int, int], tuple[Any, Any]] = {}
    needs: dict[tuple[int, int], set[tuple[int, int]]] = {}

    def key(tensor: Any) -> tuple[int, int]:
        operation, node_index, _ = history(tensor)
        if id(operation) not in rank:
            rank[id(operation)] = next(unlisted)
        place = (rank[id(operation)], node_index)
        nodes.setdefault(place, (operation, call_node(operation, node_index)))
        return place

    waiting = [key(tensor) for tensor in model.outputs if id(tensor) not in inputs]
    while waiting:
        place = waiting.pop()
        if place not in needs:
            tensors = nodes[place][1].input_tensors
            needs[place] = {key(tensor) for tensor in tensors if id(tensor) not in inputs}
            waiting += needs[place]
    for place in _sorted_topologically(needs):
        yield nodes[place]


def _sorted_topologically(needs: dict[Any, set[Any]]) -> Iterator[Any]:
    """The keys, each after those it needs, the smallest that can come first. Raises graphlib.CycleError."""
    sorter = graphlib.TopologicalSorter(needs)
    sorter.prepare()
    ready: list[Any] = []
    while sorter.is_active():
        for key in sorter.get_ready():
            heapq.heappush(ready, key)
        key = heapq.heappop(ready)
        yield key
        sorter.done(key)


def _nested_inputs(model: Any, node: Any) -> list[Any] | None:
    """The tensors that a nested model is called on, in the order of its inputs; None if they are not plain tensors."""
    arguments = node.arguments
    if len(arguments.args) != 1 or any(
        arguments.kwargs[name] is not None for name in {*arguments.kwargs} - {"training"}
    ):
        return None
    try:
        given = in_order(arguments.args[0], model)
    except ValueError:  # optional ones
        return None
    known = {id(tensor) for tensor in node.input_tensors}
    return given if len(given) == len(model.inputs) and all(id(tensor) in known for tensor in given) else None


def structure_of(model: Any) -> Any:
    """The structure of symbolic tensors that a model takes its inputs in."""
    return model.inputs if isinstance(model, keras.Sequential) else model.input  # which a Sequential model may not have


def in_order(values: Any, model: Any) -> list[Any]:
    """What a model is called on as a flat list, in the order of its inputs.

    A dictionary goes by the keys of the model's own inputs, or where these are no dictionary by their names.
    Raises ValueError where one is missing.
    """
    if not isinstance(values, dict):
        return list(keras.tree.flatten(values))
    inputs = structure_of(model)
    keyed = inputs if isinstance(inputs, dict) else {tensor.name: tensor for tensor in model.inputs}
    missing = [key for key in keyed if key not in values]
    if missing:
        raise ValueError(f"Inputs are missing: {missing}. Received: x with {list(values)}. Try x with {list(keyed)}.")
    place = {id(tensor): key for key, each in keyed.items() for tensor in keras.tree.flatten(each)}
    if len(place) != len(keyed):  # nested deeper
        return list(keras.tree.flatten({key: values[key] for key in keyed}))
    return [values[place[id(tensor)]] for tensor in model.inputs]


def _grouped(calls: Sequence[Call], composite: Container[int]) -> list[list[Call]]:
    """The calls as blocks in running order.

    Those that share variables are together, and so are those that make and read a ``composite`` value; with all that
    lies between them.
    """
    owner = _Groups(len(calls))
    users: dict[int, int] = {}
    makers = {value: index for index, call in enumerate(calls) for value in call.writes}
    for index, call in enumerate(calls):
        for variable in getattr(call.operation, "variables", ()):
            owner.join(users.setdefault(id(variable), index), index)
        for value in call.reads:
            if value in makers and value in composite:
                owner.join(makers[value], index)
    while True:
        needs: dict[int, set[int]] = {owner.of(index): set() for index in range(len(calls))}
        for index, call in enumerate(calls):
            made_by = {owner.of(makers[value]) for value in call.reads if value in makers}
            needs[owner.of(index)] |= made_by - {owner.of(index)}
        try:
            order = list(_sorted_topologically(needs))
        except graphlib.CycleError as error:  # what runs between two calls of a group belongs to it
            for member in error.args[1]:
                owner.join(error.args[1][0], member)
            continue
        members: dict[int, list[Call]] = {group: [] for group in order}
        for index, call in enumerate(calls):
            members[owner.of(index)].append(call)
        return list(members.values())


def _named(groups: Sequence[Sequence[Call]], composite: Mapping[int, str]) -> list[Block]:
    blocks, seen = [], Counter[str]()
    for calls in groups:
        name = calls[-1].name
        seen[name] += 1
        kinds = tuple((call.name, composite[value]) for call in calls for value in call.writes if value in composite)
        blocks.append(Block(name if seen[name] == 1 else f"{name}:{seen[name]}", tuple(calls), kinds))
    return blocks


class _Groups:
    """Disjoint sets of the numbers below ``count``, each known by its smallest member."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def of(self, member: int) -> int:
        while self._parent[member] != member:
            self._parent[member] = member = self._parent[self._parent[member]]
        return member

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.of(one), self.of(other)))
        self._parent[high] = low
