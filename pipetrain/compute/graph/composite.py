"""Values of a model that are ragged or sparse tensors: several tensors each, which cross no cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.graph.segment import Call, Segment, is_composite
from pipetrain.compute.keras_private import is_own

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
    reads = list(dict.fromkeys(call.reads))
    nothing = [False] * len(symbols)
    segment = Segment([call], reads, call.writes, symbols, nothing[: len(reads)], nothing[: len(call.writes)])
    given = [known.get(value) or tf.TensorSpec(symbols[value].shape, symbols[value].dtype) for value in reads]
    with keras.StatelessScope():
        made = tf.function(segment.values, autograph=False).get_concrete_function(given).structured_outputs
    return map(tf.type_spec_from_value, made)


def _spec(symbol: Any) -> Any:
    if symbol.sparse:
        return tf.SparseTensorSpec(symbol.shape, symbol.dtype)
    return tf.RaggedTensorSpec(symbol.shape, symbol.dtype, symbol.ragged_rank)
