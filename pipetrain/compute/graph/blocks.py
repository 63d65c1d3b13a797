"""A Keras model as a chain of blocks: its layer calls in the order they run, and what may cross every cut."""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.graph.calls import RecordedCalls, is_graph, sorted_topologically
from pipetrain.compute.graph.segment import NONE, Call, GlobalDraws, Segment, is_composite, is_differentiable
from pipetrain.compute.graph.sharing import state_variables, with_unread
from pipetrain.compute.keras_private import history, is_own

# Layers of Keras' own that may make a ragged or sparse tensor without saying so of their outputs.
UNDECLARED = ("Lambda", "StringLookup", "IntegerLookup", "TextVectorization", "TFSMLayer")


def composites(calls: Sequence[Call], symbols: Sequence[Any]) -> dict[int, str]:
    """The kind, ragged or sparse, of each value that is composite, by the value's number.

    A symbolic tensor's own declaration is not reliable: a layer need not declare it, and some operations declare it
    wrongly. Therefore all calls that may make such a value are traced: those that declare it, those of layers that are
    not Keras' own, and those that read a composite value.
    """
    known = _of_inputs(calls, symbols)
    for call in calls:
        if any(_is_declared(symbols[value]) for value in call.writes) or _may_differ(call, known):
            made = zip(call.writes, _traced(call, symbols, known), strict=True)
            known.update((value, spec) for value, spec in made if is_composite(spec))
    return {value: "sparse" if isinstance(spec, tf.SparseTensorSpec) else "ragged" for value, spec in known.items()}


def _of_inputs(calls: Sequence[Call], symbols: Sequence[Any]) -> dict[int, Any]:
    """The specs of the model's composite inputs, which declare their kind themselves."""
    made = {value for call in calls for value in call.writes}
    given = {value: symbols[value] for call in calls for value in call.reads if value not in made}
    return {value: _spec(symbol) for value, symbol in given.items() if _is_declared(symbol)}


def _may_differ(call: Call, known: dict[int, Any]) -> bool:
    kind = type(call.operation)
    own = is_own(kind) and kind.__name__ not in UNDECLARED
    return not own or any(value in known for value in call.reads)


def _is_declared(symbol: Any) -> bool:
    return bool(symbol.sparse or symbol.ragged)


def _traced(call: Call, symbols: Sequence[Any], known: dict[int, Any]) -> Iterator[Any]:
    """The specs of the call's outputs."""
    segment = Segment.of_call(call, symbols)
    given = [known.get(value) or tf.TensorSpec(symbols[value].shape, symbols[value].dtype) for value in segment.reads]
    with keras.StatelessScope():
        made = tf.function(segment.values, autograph=False).get_concrete_function(given).structured_outputs
    return map(tf.type_spec_from_value, made)


def _spec(symbol: Any) -> Any:
    if symbol.sparse:
        return tf.SparseTensorSpec(symbol.shape, symbol.dtype)
    return tf.RaggedTensorSpec(symbol.shape, symbol.dtype, symbol.ragged_rank)


def check_graph(model: Any) -> None:
    """Raise TypeError unless the model is Sequential or Functional, ValueError for a Sequential one without shape."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"Not a Keras model. Received: model={model!r}. Try a keras.Sequential or Functional model.")
    if isinstance(model, keras.Sequential) and not model.built:
        raise ValueError(
            f"The Sequential {model.name!r} has no input shape yet. Try keras.Input(...) as its first layer."
        )
    if not is_graph(model):
        raise TypeError(
            f"Cannot see the layers of a subclassed model. Received: model={model.name!r} ({type(model).__name__}). "
            "Try a Functional model: keras.Model(inputs, outputs). Called on a keras.Input inside one, "
            f"{type(model).__name__} becomes one block of it, which stays whole."
        )


def check_outputs(model: keras.Model, composite: Sequence[str | None]) -> None:
    """Raise ValueError for an output that is ragged or sparse; ``composite`` has the kind of each, or None."""
    for tensor, kind in zip(model.outputs, composite, strict=True):
        if kind is not None:
            operation = history(tensor)[0].name
            raise ValueError(
                f"An output of a model that is cut must be dense. Received: model={model.name!r}, whose output from "
                f"{operation!r} is {kind}. Try {'to_tensor()' if kind == 'ragged' else 'tf.sparse.to_dense'} after it."
            )


def check_crossing_types(crossing: Sequence[Any], name: str) -> None:
    """Raise ValueError for numbers that cross the cut after block ``name`` in a type that has no gradients."""
    for tensor in crossing:
        if tf.as_dtype(tensor.dtype).is_floating and not is_differentiable(tensor.dtype):
            raise ValueError(
                f"No gradient crosses a cut in the type {tensor.dtype}. Received: a cut after {name!r}, which "
                f"{tensor.name!r} crosses. Try a cut before or after what works in that type."
            )


def grouped(calls: Sequence[Call], composite: Container[int]) -> list[list[Call]]:
    """The calls as blocks in running order.

    Calls that share state (BatchNorm's statistics) are in one block with all calls between them, and so are those that
    make and read a ``composite`` value. Weights may be shared by calls in different blocks.
    """
    owner = _DisjointSets(len(calls))
    users: dict[int, int] = {}
    makers = {value: index for index, call in enumerate(calls) for value in call.writes}
    for index, call in enumerate(calls):
        for variable in state_variables(call.operation):
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
            order = list(sorted_topologically(needs))
        except graphlib.CycleError as error:  # what runs between two calls of a group belongs to it
            for member in error.args[1]:
                owner.join(error.args[1][0], member)
            continue
        members: dict[int, list[Call]] = {group: [] for group in order}
        for index, call in enumerate(calls):
            members[owner.of(index)].append(call)
        return list(members.values())


class _DisjointSets:
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
        check_graph(model)
        self.model = model
        recorded = RecordedCalls()
        self._inputs = [recorded.new_value(tensor) for tensor in model.inputs]
        self._outputs = recorded.through(model, self._inputs)
        self._symbols, self._draws = recorded.symbols, GlobalDraws()
        composite = composites(recorded.calls, recorded.symbols)
        calls = with_unread(recorded.calls, recorded.symbols)
        check_outputs(model, [composite.get(value) for value in self._outputs])
        self.blocks = _named(grouped(calls, composite), composite)
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

    def symbol(self, value: int) -> Any:
        """The symbolic tensor of a value."""
        return self._symbols[value]

    def segment(self, first: int, end: int) -> Segment:
        """Blocks ``first`` to ``end - 1`` as one layer, from what crosses into them to what crosses out.

        Raises ValueError for numbers that cross out in a type of which TensorFlow makes no gradients.
        """
        return self._between(first, end, self.crossing(first), self.crossing(end))

    def apart(self, first: int, end: int) -> Segment:
        """Like ``segment``, without the values that only pass these blocks; the model's outputs are among the last's.

        Values that come in are in the order of their numbers.
        """
        calls = list(self._calls(first, end))
        made = {value for call in calls for value in call.writes}
        reads = {value for call in calls for value in call.reads} - made
        if end == len(self.blocks):
            return self._between(first, end, sorted(reads | set(self._outputs) - made), self._outputs)
        return self._between(first, end, sorted(reads), [value for value in self.crossing(end) if value in made])

    def _between(self, first: int, end: int, reads: list[int], writes: list[int]) -> Segment:
        """Blocks ``first`` to ``end - 1`` from these values to those."""
        if end < len(self.blocks):
            check_crossing_types([self._symbols[value] for value in writes], self.blocks[end - 1].name)
        calls = list(self._calls(first, end))
        earlier = list(self._calls(0, first))
        before = Counter(id(each) for call in earlier for each in _variables(call))
        return self._segment(calls, reads, writes, self.trained(), before, earlier)

    def alone(self) -> Iterator[Segment]:
        """Every block as a layer of its own, without the values that only pass it."""
        trained = self.trained()
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

    def _segment(
        self,
        calls: Sequence[Call],
        reads: list[int],
        writes: list[int],
        trained: set[int],
        before: Mapping[int, int] = NONE,
        earlier: Sequence[Call] = (),
    ) -> Segment:
        differentiable, returns = ([value in trained for value in values] for values in (reads, writes))
        return Segment(calls, reads, writes, self._symbols, differentiable, returns, before, earlier, self._draws)

    def trained(self) -> set[int]:
        """Values that need a gradient: those of differentiable types that depend on trainable weights."""
        trained: set[int] = set()
        for call in self._calls(0, len(self.blocks)):
            if call.weights or not trained.isdisjoint(call.reads):
                trained.update(value for value in call.writes if is_differentiable(self._symbols[value].dtype))
        return trained


def _variables(call: Call) -> Sequence[keras.Variable]:
    return [each for each in getattr(call.operation, "variables", ()) if id(each) not in call.unread]


def _named(groups: Sequence[Sequence[Call]], composite: Mapping[int, str]) -> list[Block]:
    blocks, seen = [], Counter[str]()
    for calls in groups:
        name = calls[-1].name
        seen[name] += 1
        kinds = tuple((call.name, composite[value]) for call in calls for value in call.writes if value in composite)
        blocks.append(Block(name if seen[name] == 1 else f"{name}:{seen[name]}", tuple(calls), kinds))
    return blocks


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
