"""A Keras model as a chain of blocks, and any run of neighbouring blocks as a layer of its own."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras


class Block(NamedTuple):
    """One layer call of the model: the smallest piece a cut can separate.

    ``node`` is Keras' record of the call: its arguments, and the symbolic tensors in and out.
    """

    layer: Any
    node: Any

    @property
    def name(self) -> str:
        """The layer's name."""
        return str(self.layer.name)


def chain(model: keras.Model) -> list[Block]:
    """The model's layer calls in the order they run.

    Raises ValueError where the model is not a chain: every layer must take the one tensor that the layer
    before it made. TypeError for a subclassed model, whose layer calls Keras does not record.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"Not a Keras model. Received: model={model!r}. Try a keras.Sequential or Functional model.")
    if isinstance(model, keras.Sequential) and not model.built:
        raise ValueError(
            f"The Sequential {model.name!r} has no input shape yet. Try keras.Input(...) as its first layer."
        )
    outputs = getattr(model, "outputs", None)
    if not outputs:
        raise TypeError(
            f"Cannot see the layers of a subclassed model. Received: model={model.name!r} "
            f"({type(model).__name__}). Try keras.Sequential, or keras.Model(inputs, outputs)."
        )
    blocks: list[Block] = []
    tensor = _only("outputs", model.name, outputs)
    while True:
        block = _maker(tensor)
        if block.node.is_input:
            break
        blocks.append(block)
        tensor = _only("inputs", block.name, block.node.input_tensors)
    blocks.reverse()
    _check_called_once(blocks)
    return blocks


def _maker(tensor: Any) -> Block:
    layer, node_index, _ = tensor._keras_history
    return Block(layer, layer._inbound_nodes[node_index])


def _only(what: str, name: str, tensors: Sequence[Any]) -> Any:
    distinct = {id(tensor): tensor for tensor in tensors}
    if len(distinct) != 1:
        raise ValueError(
            f"Only chains of layers can be cut. Received: {name!r} with {len(distinct)} {what}. "
            "Try a Sequential model, or a Functional one without branches."
        )
    return next(iter(distinct.values()))


def _check_called_once(blocks: Sequence[Block]) -> None:
    seen: set[int] = set()
    for block in blocks:
        if id(block.layer) in seen:
            raise ValueError(
                f"The layer {block.name!r} is called more than once, so its weights would belong to several stages. "
                "Try a layer for each call."
            )
        seen.add(id(block.layer))


def cut_points(blocks: Sequence[Block], cuts: Sequence[str]) -> list[int]:
    """Where each stage ends, from the names of the last layers of all stages but the final one.

    Raises ValueError for a name that no layer has, for names out of order, and for the model's last layer.
    """
    names = [block.name for block in blocks]
    ends = []
    for cut in cuts:
        if cut not in names:
            raise ValueError(f"Unknown layer in cuts. Received: cuts={tuple(cuts)!r} with {cut!r}. Try {_some(names)}.")
        ends.append(names.index(cut) + 1)
    if ends != sorted(set(ends)):
        in_order = tuple(sorted(set(cuts), key=names.index))
        raise ValueError(
            f"The cuts are not in the model's order, each once. Received: cuts={tuple(cuts)!r}. Try cuts={in_order!r}."
        )
    if ends and ends[-1] == len(blocks):
        raise ValueError(
            f"Nothing is left for the last stage. Received: cuts={tuple(cuts)!r}, where {names[-1]!r} "
            "is the model's last layer. Try leaving it out."
        )
    return [*ends, len(blocks)]


def _some(names: list[str]) -> str:
    shown = names if len(names) <= 12 else [*names[:6], "...", *names[-5:]]
    return "one of: " + ", ".join(shown)


class Segment(keras.Layer):
    """A run of neighbouring blocks as one layer, over the very layers of the model: nothing is copied.

    Takes the tensor that the first block takes and returns the tensor that the last one makes. Calling the
    blocks from their recorded nodes leaves the model's own graph as it is, where a sub-model over the same
    layers would add to it.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__(autocast=False)
        self._nodes = [block.node for block in blocks]
        self._trains = ["training" in inspect.signature(block.layer.call).parameters for block in blocks]
        self._pieces = [block.layer for block in blocks]  # a list of layers, so that Keras finds their variables
        self.input_tensor = blocks[0].node.input_tensors[0]
        self.output_tensor = blocks[-1].node.output_tensors[0]
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Run the blocks as a Functional model would: its training mode overrides that of the recorded calls."""
        values = {id(self.input_tensor): inputs}
        for layer, node, trains in zip(self._pieces, self._nodes, self._trains, strict=True):
            args, kwargs = node.arguments.fill_in(values)
            if trains and training is not None:
                kwargs["training"] = training
            outputs = layer(*args, **kwargs)
            values.update(zip(map(id, node.output_tensors), keras.tree.flatten(outputs), strict=True))
        return values[id(self.output_tensor)]
