"""The layer calls of a model, as Keras recorded them, in a topological order."""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import keras

from pipetrain.compute.graph.blocks import Block
from pipetrain.compute.graph.inputs import in_order
from pipetrain.compute.graph.segment import Call
from pipetrain.compute.graph.sharing import state_variables
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


def cut_points(blocks: Sequence[Block], cuts: Sequence[str]) -> list[int]:
    """Where each stage ends, from the names of the last layers of all stages but the final one.

    A layer inside a nested model is ``"outer/inner"``, or ``"inner"`` where no other layer is called so; a nested
    model's own name stands for its last layer.
    Raises ValueError for a name that no layer has, for names out of order, for the model's last layer, and for a
    layer after which no cut can be made because calls before and after it share state, or because its output is
    ragged or sparse.
    """
    if isinstance(cuts, str):
        raise ValueError(f"Cuts are a tuple of layers' names. Received: cuts={cuts!r}. Try cuts=({cuts!r},).")
    ends = [_end(blocks, cut, cuts) for cut in cuts]
    if ends != sorted(set(ends)):
        in_order = tuple(name for _, name in sorted({end: cut for cut, end in zip(cuts, ends, strict=True)}.items()))
        raise ValueError(
            f"The cuts are not in the model's order, each once. Received: cuts={tuple(cuts)!r}. Try cuts={in_order!r}."
        )
    if ends and ends[-1] == len(blocks):
        raise ValueError(
            f"Nothing is left for the last stage. Received: cuts={tuple(cuts)!r}, where {cuts[-1]!r} "
            "is the model's last layer. Try leaving it out."
        )
    return [*ends, len(blocks)]


def _end(blocks: Sequence[Block], cut: str, cuts: Sequence[str]) -> int:
    """The number of blocks up to and including the one that ends with this layer."""
    names = [block.name for block in blocks]
    if cut in names:
        return names.index(cut) + 1
    calls = [(index, call) for index, block in enumerate(blocks) for call in block.calls]
    found = [(index, call) for index, call in calls if call.name == cut or call.name.startswith(f"{cut}/")]
    inside = [(index, call) for index, call in calls if call.name.endswith(f"/{cut}")]
    if not found and len({call.name for _, call in inside}) == 1:
        return _end(blocks, inside[0][1].name, cuts) if inside[0][1].name in names else inside[-1][0] + 1
    if not found:
        within = next((f": {why}" for model, why in _unopened(blocks) if _has(model, cut)), "")
        raise ValueError(
            f"Unknown layer in cuts{within}. Received: cuts={tuple(cuts)!r} with {cut!r}. Try {_some(names)}."
        )
    index, call = found[-1]
    if call is not blocks[index].calls[-1]:
        raise ValueError(
            f"No cut can be made after {cut!r}: {reason(blocks[index])}, so all from the first to the last of "
            f"these calls stays in one stage. Received: cuts={tuple(cuts)!r}. Try {names[index]!r}."
        )
    return index + 1


def reason(block: Block) -> str:
    """The reason, as text, why a block cannot be cut."""
    users: dict[int, list[str]] = {}
    for call in block.calls:
        for variable in state_variables(call.operation):
            users.setdefault(id(variable), []).append(call.name)
    names = list(dict.fromkeys(name for each in users.values() if len(each) > 1 for name in each))
    if not names:
        return " and ".join(f"what {name!r} makes is {kind} and crosses no cut" for name, kind in block.composite)
    if len(names) == 1:
        return f"{names[0]!r} is called more than once"
    return f"{' and '.join(map(repr, names))} share state"


def why_together(blocks: Sequence[Block]) -> str:
    """The reason, as text, why several layers are one block; empty if there is none."""
    largest = max(blocks, key=lambda block: len(block.calls), default=None)
    if largest is not None and len(largest.calls) > 1:
        return f" ({reason(largest)}, which keeps {len(largest.calls)} calls together)"
    return next((f" ({why})" for _, why in _unopened(blocks)), "")


def _unopened(blocks: Sequence[Block]) -> Iterator[tuple[keras.Model, str]]:
    """The nested models that are blocks of their own, each with the reason, as text, why its layers are not seen."""
    for call in (call for block in blocks for call in block.calls):
        if is_graph(call.operation):
            yield call.operation, f"{call.name!r} is called with a mask or other settings, and is not cut inside"
        elif isinstance(call.operation, keras.Model):
            yield call.operation, f"{call.name!r} is a subclassed model, which is not cut inside"


def _has(model: keras.Model, name: str) -> bool:
    """Whether a model has a layer of this name; of a nested one's the last part is compared."""
    return any(layer.name == name.rsplit("/", 1)[-1] for layer in model.layers)


def _some(names: list[str]) -> str:
    shown = names if len(names) <= 12 else [*names[:6], "...", *names[-5:]]
    return "one of: " + ", ".join(shown)
