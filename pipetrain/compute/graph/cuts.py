"""Where users may cut a chain of blocks, by the names of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import keras

from pipetrain.compute.graph.blocks import Block
from pipetrain.compute.graph.calls import is_graph
from pipetrain.compute.graph.sharing import state_variables


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
