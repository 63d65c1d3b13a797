"""What a stage's forward leaves for its backward: residuals as few tensors, or what it takes to run it again.

For every tensor that it releases, a thread gives up Python's global lock, for which others may be waiting; releasing a
tensor of another process takes a message. So residuals are packed.

With recomputation a forward is run again, and its stateful operations have to give the same values as the first time.
TensorFlow's own random operations draw from a state that no argument holds, a ``tf.random.Generator`` from a variable
that it advances. Run twice they would give other values and advance twice. The first run therefore returns their
values, and the second uses these instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import origin, showing, without
from pipetrain.compute.functions.split import specs

# Never in a GPU's memory, where all that is in a GPU's pack has to be.
APART = (tf.int32, tf.string, tf.resource, tf.variant)
Packed = TypeVar("Packed", tf.Tensor, tf.TensorSpec)
MOST = 64  # tensors of a pack: TensorFlow takes four times as long to prepare a function with packs twice as large


def packed(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors that can be packed as a tensor for each ``MOST`` of them, without a copy; then the others."""
    together = [tensor for tensor in tensors if tensor.dtype not in APART]
    apart = [tensor for tensor in tensors if tensor.dtype in APART]
    return [*(tf.raw_ops.OptionalFromValue(components=each) for each in _packs(together)), *apart]


def packed_specs(specs: Sequence[tf.TensorSpec]) -> list[tf.TensorSpec]:
    """The specs of what ``packed`` makes of tensors with these specs."""
    together = [spec for spec in specs if spec.dtype not in APART]
    apart = [spec for spec in specs if spec.dtype in APART]
    return [*(tf.TensorSpec([], tf.variant) for _ in _packs(together)), *apart]


def unpacked(given: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """The tensors with these specs that ``packed`` was given; the same tensors where it was called in this graph."""
    packs = _packs([spec for spec in specs if spec.dtype not in APART])
    apart = iter(given[len(packs) :])
    values = (value for pack, like in zip(given, packs, strict=False) for value in _values(pack, like))
    return [next(apart) if spec.dtype in APART else next(values) for spec in specs]


def _packs(values: Sequence[Packed]) -> list[list[Packed]]:
    return [list(values[first : first + MOST]) for first in range(0, len(values), MOST)]


class Packing(NamedTuple):
    """How residuals leave a function and enter another: what is made of them, its specs, and the way back."""

    pack: Callable[[list[tf.Tensor]], list[tf.Tensor]]
    specs: Callable[[Sequence[tf.TensorSpec]], list[tf.TensorSpec]]
    unpack: Callable[[Sequence[tf.Tensor], Sequence[tf.TensorSpec]], list[tf.Tensor]]


PACKED = Packing(packed, packed_specs, unpacked)
SEPARATE = Packing(list, list, lambda given, specs: list(given))


def _values(pack: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> Sequence[tf.Tensor]:
    made_by = origin(pack)
    if made_by.type == "OptionalFromValue":
        return list(made_by.inputs)
    types, shapes = [spec.dtype for spec in specs], [spec.shape for spec in specs]
    return list(tf.raw_ops.OptionalGetValue(optional=pack, output_types=types, output_shapes=shapes))


class Repeatable(NamedTuple):
    """Concrete functions ``first(*arguments) -> (aux, drawn)`` and ``again(*arguments, drawn) -> (aux, residuals)``."""

    first: Any
    again: Any


def repeatable(forward: Any, packing: Packing) -> Repeatable | None:
    """The two runs of a concrete ``forward(*arguments) -> (aux, residuals)``; None if it can be repeated as it is."""
    stateful = [each for each in forward.graph.get_operations() if each.op_def.is_stateful]
    if not stateful:
        return None
    returned = {id(tensor) for tensor in forward.graph.outputs}
    made = [each for operation in stateful for each in operation.outputs if each.consumers() or id(each) in returned]
    arguments, _ = forward.structured_input_signature  # all are given by position

    def first(*given: Any) -> Any:
        (aux, _), drawn = showing(forward, made, *given)
        return aux, packing.pack(drawn)

    def again(*given: Any) -> Any:
        *given_to_first, drawn = given
        values = dict(zip([each.name for each in made], packing.unpack(drawn, specs(made)), strict=True))
        return without(forward, stateful, values, *given_to_first)

    traced = [tf.function(each, autograph=False) for each in (first, again)]
    drawn = packing.specs(specs(made))
    return Repeatable(traced[0].get_concrete_function(*arguments), traced[1].get_concrete_function(*arguments, drawn))
