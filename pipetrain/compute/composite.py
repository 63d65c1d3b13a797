"""Values of a model that are ragged or sparse tensors: several tensors each, which cross no cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.segment import Call, Segment, is_composite

# Layers of Keras' own that may make a ragged or sparse tensor without saying so of their outputs.
UNDECLARED = ("Lambda", "StringLookup", "IntegerLookup", "TextVectorization", "TFSMLayer")


def composites(calls: Sequence[Call], symbols: Sequence[Any]) -> dict[int, str]:
    """The values that are ragged or sparse, by number, each with which of the two it is.

    A symbolic tensor tells of a layer's output only what the layer declares. So layers that are not Keras' own, and
    whatever reads a composite value, are traced.
    """
    found: dict[int, Any] = {}
    for call in calls:
        if any(_is_declared(symbols[value]) for value in call.writes) or _may_differ(call, found):
            made = zip(call.writes, _traced(call, symbols, found), strict=True)
            found.update((value, spec) for value, spec in made if is_composite(spec))
    return {value: "sparse" if isinstance(spec, tf.SparseTensorSpec) else "ragged" for value, spec in found.items()}


def _may_differ(call: Call, found: dict[int, Any]) -> bool:
    kind = type(call.operation)
    own = kind.__module__.startswith("keras.src.") and kind.__name__ not in UNDECLARED
    return not own or any(value in found for value in call.reads)


def _is_declared(symbol: Any) -> bool:
    return bool(symbol.sparse or symbol.ragged)


def _traced(call: Call, symbols: Sequence[Any], found: dict[int, Any]) -> Iterator[Any]:
    """The specs of what the call makes."""
    reads = list(dict.fromkeys(call.reads))
    nothing = [False] * len(symbols)
    segment = Segment([call], reads, call.writes, symbols, nothing[: len(reads)], nothing[: len(call.writes)])
    given = [found.get(value) or _spec(symbols[value]) for value in reads]
    with keras.StatelessScope():
        made = tf.function(segment.values, autograph=False).get_concrete_function(given).structured_outputs
    return map(tf.type_spec_from_value, made)


def _spec(symbol: Any) -> Any:
    if symbol.sparse:
        return tf.SparseTensorSpec(symbol.shape, symbol.dtype)
    if symbol.ragged:
        return tf.RaggedTensorSpec(symbol.shape, symbol.dtype, symbol.ragged_rank)
    return tf.TensorSpec(symbol.shape, symbol.dtype)
