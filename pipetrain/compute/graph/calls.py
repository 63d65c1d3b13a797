"""The layer calls of a model, as Keras recorded them, in a topological order."""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import keras

from pipetrain.compute.graph.inputs import in_order
from pipetrain.compute.graph.segment import Call
from pipetrain.compute.keras_private import call_node, history, keeps_call


def sorted_topologically(needs: dict[Any, set[Any]]) -> Iterator[Any]:
    """The keys, each after those it needs, the smallest possible one first. Raises graphlib.CycleError."""
    sorter = graphlib.TopologicalSorter(needs)
    sorter.prepare()
    ready: list[Any] = []
    while sorter.is_active():
        for key in sorter.get_ready():
            heapq.heappush(ready, key)
        key = heapq.heappop(ready)
        yield key
        sorter.done(key)


class RecordedCalls:
    """A model's calls in Keras' own order, with those of nested models in place; every tensor has a number.

    ``calls`` are the calls recorded so far, ``symbols`` the symbolic tensor of every value by its number.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.symbols: list[Any] = []

    def new_value(self, tensor: Any) -> int:
        """A number for the value of a symbolic tensor."""
        self.symbols.append(tensor)
        return len(self.symbols) - 1

    def through(self, model: Any, inputs: Sequence[int], path: str = "") -> list[int]:
        """Append the calls of ``model`` on these values, ``path`` before their names; gives the outputs' values."""
        known = dict(zip(map(id, model.inputs), inputs, strict=True))
        for operation, node in _calls_in_order(model):
            name = path + operation.name
            given = _nested_inputs(operation, node) if is_graph(operation) else None
            if given is not None:
                made = self.through(operation, [known[id(tensor)] for tensor in given], f"{name}/")
            else:
                made = [self.new_value(tensor) for tensor in node.output_tensors]
                reads = tuple(known[id(tensor)] for tensor in node.input_tensors)
                self.calls.append(Call(name, operation, node, reads, tuple(made)))
            known.update(zip(map(id, node.output_tensors), made, strict=True))
        return [known[id(tensor)] for tensor in model.outputs]


def is_graph(operation: Any) -> bool:
    """Whether this is a Sequential or Functional model with Keras' own ``call``, so that its calls are known."""
    if not isinstance(operation, keras.Model) or not keeps_call(type(operation)):
        return False
    try:
        return bool(operation.outputs)
    except AttributeError:
        return False


def _calls_in_order(model: Any) -> Iterator[tuple[Any, Any]]:
    """The calls that the outputs need, in the order of Keras' list of operations as far as possible."""
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

    # Only what leads to the outputs: a model's layers may have been called for other models too.
    waiting = [key(tensor) for tensor in model.outputs if id(tensor) not in inputs]
    while waiting:
        place = waiting.pop()
        if place not in needs:
            tensors = nodes[place][1].input_tensors
            needs[place] = {key(tensor) for tensor in tensors if id(tensor) not in inputs}
            waiting += needs[place]
    for place in sorted_topologically(needs):
        yield nodes[place]


def _nested_inputs(model: Any, node: Any) -> list[Any] | None:
    """The tensors that a nested model is called on, in the order of its inputs; None if they are not plain tensors."""
    arguments = node.arguments
    given = {"inputs": arguments.args[0]} if len(arguments.args) == 1 else {}
    given |= {name: value for name, value in arguments.kwargs.items() if name != "training" and _is_given(value)}
    if len(arguments.args) > 1 or set(given) != {"inputs"}:
        return None
    try:
        tensors = in_order(given["inputs"], model)
    except ValueError:  # optional ones
        return None
    known = {id(tensor) for tensor in node.input_tensors}
    return tensors if len(tensors) == len(model.inputs) and all(id(tensor) in known for tensor in tensors) else None


def _is_given(value: Any) -> bool:
    """Whether an argument is anything but None: Keras records a structure of None as the mask of several inputs."""
    return any(each is not None for each in keras.tree.flatten(value))
