"""Running a forward again so that its stateful operations give the same values as the first time.

TensorFlow's own random operations draw from a state that no argument holds, a ``tf.random.Generator`` from a variable
that it advances. Run twice they would give other values and advance twice. The first run therefore returns their
values, and the second uses these instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import showing, without
from pipetrain.compute.functions.packed import Packing
from pipetrain.compute.functions.split import specs


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
