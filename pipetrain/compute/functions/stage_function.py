"""What a stage computes in training, as a function of tensors that is traced in two halves, with its layers' losses.

Whether the loss that a layer adds is a mean or a sum over the rows of a part of a minibatch has to be known. A weight
regularizer has the same value for every part, and an activity regularizer is a mean over rows: the minibatch's loss is
the mean of the parts' losses, weighted by rows. A loss given to ``add_loss`` may be such a mean, or a sum over rows,
which Keras makes of one loss for each example. Only a trial run tells which.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.functions.kernels import Kernels
from pipetrain.compute.functions.split import SplitFunction, specs, split, symbolic_gradients
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.functions.state import State
from pipetrain.compute.functions.weight_binding import any_rows
from pipetrain.compute.functions.weight_products import over_any_rows, products
from pipetrain.compute.graph.segment import Segment, assigned_to
from pipetrain.compute.keras_private import mask_of

ROWS = 4  # which a sum and a mean tell apart well, random numbers in the layers or not
EXACT, ROUGH = 1e-3, 1.5  # how near a loss without random numbers comes, and a factor for one with them
UNKNOWN = 16  # a size that the model leaves open


def total_penalty(penalties: Sequence[tf.Tensor], summed: Sequence[bool] = ()) -> tf.Tensor | None:
    """The sum of layers' own losses, each of which Keras sums over its elements; None where there is none.

    Where some are ``summed`` over rows, two numbers: the sum of the others, and the sum of these.
    """
    sums = [tf.cast(tf.reduce_sum(each), tf.float32) for each in penalties]
    if not any(summed):
        return tf.add_n(sums) if sums else None
    known = [*summed, *[False] * (len(sums) - len(summed))]  # the last ones are weights', which have no rows
    means, over_rows = (
        [each for each, is_sum in zip(sums, known, strict=True) if is_sum == kind] for kind in (False, True)
    )
    return tf.stack([tf.add_n([tf.zeros([]), *means]), tf.add_n(over_rows)])


def as_mean(penalty: tf.Tensor, share: Any) -> tf.Tensor:
    """``total_penalty`` of a part of a minibatch as one number, weighted by its ``share`` of the rows."""
    return penalty if penalty.shape.rank == 0 else penalty[0] + penalty[1] / share


def joined_loss(losses: Sequence[tuple[tf.Tensor, Any]], penalties: Sequence[tuple[tf.Tensor, Any]]) -> tf.Tensor:
    """A minibatch's loss from those of its parts, each with its share: the sum of all, as ``float32``.

    Losses of single rows are concatenated, each with the penalties added.
    """
    terms, added = [_scaled(*each) for each in losses], [_scaled(*each) for each in penalties]
    if terms[0].shape.rank:
        return sum(added, start=tf.concat(terms, 0))
    terms += added
    return terms[0] if len(terms) == 1 else tf.add_n(terms)


def _scaled(value: tf.Tensor, factor: Any) -> tf.Tensor:
    value = tf.cast(value, tf.float32)
    return value if isinstance(factor, float) and factor == 1.0 else value * factor


def penalty_gradient(spec: tf.TensorSpec, scaled_share: Any, scale: Any) -> Any:
    """The output gradient of a ``total_penalty`` of this form, in a loss that is multiplied by the ``scale``.

    ``scaled_share`` is the share of the rows times the scale.
    """
    return scaled_share if spec.shape.rank == 0 else (scaled_share, scale)


def summed_over_rows(segment: Segment, masks: Sequence[Any], training: bool) -> list[bool]:
    """Which of the losses that the segment's layers add are sums over rows, the others being means.

    It compares the losses of ``ROWS`` random rows together with those of each row. Raises ValueError for a loss that is
    neither.
    """
    state = [tf.convert_to_tensor(variable.value) for variable in segment.non_trainable_variables]
    weights = [tf.convert_to_tensor(variable.value) for variable in segment.trainable_variables]
    like = [tf.TensorSpec([None, *(size or UNKNOWN for size in x.shape[1:])], x.dtype) for x in segment.inputs]
    masks = [None if mask is None else tf.TensorSpec([None, *_sizes(mask)[1:]], mask.dtype) for mask in masks]

    def added(state: Any, tensors: Any, masks: Any) -> Any:
        losses = segment.added_losses(weights, state, tensors, masks, training)
        return [tf.cast(tf.reduce_sum(each), tf.float32) for each in losses]

    function = tf.function(added, autograph=False).get_concrete_function(specs(state), like, masks)
    tensors, given = [_sample(spec, n) for n, spec in enumerate(like)], [_ones(mask) for mask in masks]

    def of(rows: slice, state: Any = state) -> Any:
        part = [each[rows] for each in tensors], [None if each is None else each[rows] for each in given]
        return np.array([float(each) for each in function(state, *part)])

    together, again = of(slice(None)), of(slice(None), [_moved_on(each) for each in state])
    alone = sum(of(slice(n, n + 1)) for n in range(ROWS))
    return [_is_sum(*each, segment=segment) for each in zip(together, again, alone, strict=True)]


def _is_sum(together: float, again: float, alone: float, segment: Segment) -> bool:
    if together == alone == 0.0:
        return False
    random = not np.isclose(together, again, rtol=1e-6)
    for share, is_sum in ((1.0, True), (1.0 / ROWS, False)):
        expected = alone * share
        if np.isclose(together, expected, rtol=EXACT) or (random and 1 / ROUGH < together / (expected or 1.0) < ROUGH):
            return is_sum
    raise ValueError(
        "A loss that a layer adds cannot be put together from those of a minibatch's parts: it is neither a mean nor "
        f"a sum over the rows. Received: {together:.6g} for {ROWS} rows that have {alone:.6g} together one by one, in "
        f"a stage that ends with {segment.outputs[0].name!r}. Try microbatches=1 and one replica of each stage."
    )


def _sizes(mask: Any) -> list[int]:
    return [size or UNKNOWN for size in mask.shape]


def _sample(spec: tf.TensorSpec, seed: int) -> tf.Tensor:
    shape = [ROWS, *spec.shape[1:]]
    if spec.dtype.is_floating or spec.dtype.is_complex:
        return tf.cast(tf.random.stateless_normal(shape, seed=(seed, 1)), spec.dtype)
    return tf.zeros(shape, spec.dtype)


def _ones(mask: tf.TensorSpec | None) -> tf.Tensor | None:
    return None if mask is None else tf.ones([ROWS, *mask.shape[1:]], mask.dtype)


def _moved_on(value: tf.Tensor) -> tf.Tensor:
    """Another value where the variable is a seed."""
    return value + 1 if value.dtype.is_integer else value


KNOWN_ROWS = 2  # of a trace that tells how many rows of a matrix belong to an example
LossFunction = Callable[[Any, list[tf.Tensor], Any], tf.Tensor]


class StageFunction:
    """A stage's blocks, after which the last stage computes the loss, for inputs with certain masks and targets.

    The function takes weights, state, the inputs that want a gradient, and as constants all other inputs, the masks and
    the targets. It gives what gradients start from, and besides that the outputs, the loss, the layers' own losses, and
    the values that layers assign.

    Args:
        segment: the blocks.
        loss: that of the last stage, see ``Stage``; None for the others.
        state: the stage's, which is completed by what traces find to be assigned.
        kernels: what runs the halves.
        masks: the specs of the inputs' masks.
        targets: at the last stage those of labels and sample weights.
        unreached: the outputs on which, as the next stage found, the loss does not depend.

    ``assigned`` are the numbers of the state's variables that layers assign to, ``changed`` those of the weights, as
    the last trace has found.
    """

    def __init__(
        self,
        segment: Segment,
        loss: LossFunction | None,
        state: State,
        kernels: Kernels,
        masks: Sequence[tf.TensorSpec | None],
        targets: Any,
        unreached: Collection[int],
    ) -> None:
        self._segment, self._loss, self._state, self._kernels = segment, loss, state, kernels
        self._returns = [returned and n not in unreached for n, returned in enumerate(segment.returns)]
        self._given = self.arguments(BoundaryTensors(any_rows(segment.inputs), list(masks)), targets)
        self.assigned: list[int] = []
        self.changed: list[int] = []
        self._added = 0  # how many losses the last trace has found that are no regularizers of weights
        self._summed: list[bool] = []  # which of them are sums over rows

    def arguments(self, values: BoundaryTensors, targets: Any) -> tuple[list[Any], Any]:
        """The function's arguments besides weights and state: the inputs that need a gradient, and the constants."""
        flows = self._segment.differentiable
        differentiable = [tensor for tensor, flow in zip(values.tensors, flows, strict=True) if flow]
        others = [tensor for tensor, flow in zip(values.tensors, flows, strict=True) if not flow]
        return differentiable, (others, values.masks, targets)

    def halves(self) -> SplitFunction:
        """Forward and backward, traced for any number of rows."""
        return self._split(*self._given)

    def products(self, halves: SplitFunction, minibatch_rows: int) -> set[int]:
        """The weights whose gradients can be made once for all microbatches of so many rows; none where that is 0.

        How many rows the factors have for each example is seen in a second trace, for a known number of examples.
        """
        if not minibatch_rows or not (possible := over_any_rows(symbolic_gradients(halves))):
            return set()
        try:
            exact = self._split(*tf.nest.map_structure(_with_rows, self._given))
        except Exception:  # whatever layers raise that take other numbers of examples alone
            return set()
        return possible & products(symbolic_gradients(exact), KNOWN_ROWS, minibatch_rows)

    def _split(self, differentiable: Any, constants: Any) -> SplitFunction:
        self._added, self._summed = 0, []
        kernels = self._kernels
        handed = kernels.packing.pack, kernels.returns_tensors, kernels.compiled, self._staying, lambda: self.changed
        weights = specs(self._segment.trainable_variables)
        given = weights, self._state.specs(), differentiable, constants, *handed
        halves = split(self._run, *given)
        if self._state.complete():
            return self._split(differentiable, constants)
        if self._state.is_divided and self._added:
            _, masks, _ = constants
            self._summed = summed_over_rows(self._segment, masks, training=True)
            halves = split(self._run, *given) if any(self._summed) else halves
        return halves

    def _staying(self) -> list[int]:
        """The numbers of the state that no layer assigns to, as the last trace has found."""
        return [n for n in range(len(self._state.variables)) if n not in self.assigned]

    def _run(self, weights: Any, state: Any, differentiable: Any, constants: Any) -> Any:
        others, masks, targets = constants
        outputs, after, penalties, left = self._segment.run(weights, state, differentiable, others, masks)
        self.assigned, self.changed = assigned_to(state, after), assigned_to(weights, left)
        starts = [tensor for tensor, returned in zip(outputs, self._returns, strict=True) if returned]
        loss = None
        if self._loss:
            loss = _computed(self._loss, outputs, targets)
            starts = [loss if loss.shape.rank == 0 else tf.reduce_sum(loss)]  # a number, or one for each row
        self._added = self._segment.added(penalties)
        penalty = total_penalty(penalties, self._summed)
        values = BoundaryTensors(outputs, [mask_of(output) for output in outputs])
        new = [after[n] for n in self.assigned], [left[n] for n in self.changed]
        return starts if penalty is None else [*starts, penalty], (values, loss, penalty, new)


def _computed(loss: LossFunction, outputs: list[tf.Tensor], targets: Any) -> tf.Tensor:
    y, sample_weight = targets
    try:
        with keras.StatelessScope():  # trackers of single losses are the caller's to update
            return loss(y, outputs, sample_weight)
    except (TypeError, ValueError) as error:
        labels, shapes = tf.nest.map_structure(lambda each: tuple(each.shape), (y, outputs))
        raise ValueError(
            f"The loss cannot be computed: {error} Received: y of shape {labels} for outputs of shape {shapes}. "
            "Try labels of the shape that the loss takes."
        ) from error


def _with_rows(spec: Any) -> Any:
    """The spec of a tensor, with ``KNOWN_ROWS`` where the number of rows is open; anything else as it is."""
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank or spec.shape[0] is not None:
        return spec
    return tf.TensorSpec([KNOWN_ROWS, *spec.shape[1:]], spec.dtype)
