"""A Keras model as a chain of blocks: its layer calls in the order they run, and what crosses every cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from pipetrain.compute.graph.calls import RecordedCalls
from pipetrain.compute.graph.checks import check_crossing_types, check_graph, check_outputs
from pipetrain.compute.graph.composite import composites
from pipetrain.compute.graph.grouping import grouped
from pipetrain.compute.graph.segment import NONE, Call, GlobalDraws, Segment, is_differentiable
from pipetrain.compute.graph.sharing import with_unread


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
