"""What goes into a stage's functions, what comes out, and what a forward leaves for its backward.

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


class Constants:
    """Makes tensors of numbers on a device, and keeps them for later calls.

    Args:
        device: a TensorFlow device name.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._made: dict[Any, tf.Tensor] = {}

    def __call__(self, value: Any, dtype: tf.DType) -> tf.Tensor:
        """The number, or numbers, as a tensor of this type; a tensor of this type is returned as it is.

        While a function is traced the tensor is still a kept one, which the function captures.
        """
        if isinstance(value, tf.Tensor):
            return value if value.dtype == dtype else tf.cast(value, dtype)
        if isinstance(value, tuple) and any(isinstance(each, tf.Tensor) for each in value):
            return tf.stack([tf.cast(each, dtype) for each in value])
        if (value, dtype) not in self._made:
            with tf.init_scope(), tf.device(self._device):
                self._made[value, dtype] = tf.constant(value, dtype)
        return self._made[value, dtype]

    def clear(self) -> None:
        """Keep none of them any more."""
        self._made.clear()


class BoundaryTensors(NamedTuple):
    """What crosses a cut: tensors, and the Keras mask that each carries (None for most)."""

    tensors: list[tf.Tensor]
    masks: list[tf.Tensor | None]


def without_rows(like: tf.Tensor) -> tf.Tensor:
    """A tensor of as many dimensions, and no rows."""
    return tf.zeros([0, *(size or 0 for size in like.shape[1:])], like.dtype)


def joined_rows(parts: Sequence[Any]) -> Any:
    """The rows of all parts, which are nested alike, one after another; None stays None."""
    if len(parts) == 1:
        return parts[0]
    return tf.nest.map_structure(lambda *rows: None if rows[0] is None else tf.concat(rows, 0), *parts)


class Forward(NamedTuple):
    """The results of a stage's forward: outputs, the loss (last stage), its layers' own losses, and ``kept``.

    The loss is a number, or one for every example where it is not to be reduced. ``kept`` is for its backward; it is
    None where there is no backward.
    """

    output: BoundaryTensors
    loss: tf.Tensor | None
    penalty: tf.Tensor | None
    kept: SavedForBackward | None


class SavedForBackward(NamedTuple):
    """What a forward leaves for its backward: packed residuals, or with recomputation the forward's inputs.

    ``weights`` are those of the forward if the backward has others; ``inputs`` end with the values that were drawn, if
    any were.
    """

    residuals: list[tf.Tensor] | None
    weights: Any = None
    state: Sequence[tf.Tensor] = ()
    inputs: Any = None


class Operands(NamedTuple):
    """What the first halves of some microbatches' backwards leave for the second ones: of each the packed tensors."""

    packed: list[list[tf.Tensor]]


class KeptStage(NamedTuple):
    """All that a stage holds between two calls of functions: of every variable that updates change, and its state."""

    variables: list[tf.Tensor]
    state: list[tf.Tensor]


class Inputs(NamedTuple):
    """A forward's inputs other than weights: what crosses the cut and, at the last stage, labels and sample weights."""

    values: BoundaryTensors
    targets: Any = None


class Step(NamedTuple):
    """The inputs of an update other than gradients; a rate of None leaves a learning-rate schedule unchanged.

    The gradients are those of a loss that was multiplied by the ``loss_scale``.
    """

    learning_rate: float | None
    staleness: int = 0
    loss_scale: float = 1.0


class BackwardResult(NamedTuple):
    """The results of a backward: gradients of the weights, and of inputs.

    Where the call has ``updated`` the stage's own weights, only the gradients of those that it shares are left. For a
    forward in the same call also its results, and the time when it was finished (``time.perf_counter``; in a
    function that is traced the time of day, as a tensor), if known.
    """

    gradients: list[Any]
    by_input: list[tf.Tensor]
    updated: bool = False
    forward: Forward | None = None
    forward_end_s: Any = None


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
