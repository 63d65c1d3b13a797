"""Losses that layers add: whether the loss of a part of a minibatch is a mean or a sum over its rows.

A weight regularizer has the same value for every part, and an activity regularizer is a mean over rows: the minibatch's
loss is the mean of the parts' losses, weighted by rows. A loss given to ``add_loss`` may be such a mean, or a sum over
rows, which Keras makes of one loss for each example. Only a trial run tells which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipetrain.compute.functions.split import specs as specs_of
from pipetrain.compute.graph.segment import Segment

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
    specs = [tf.TensorSpec([None, *(size or UNKNOWN for size in x.shape[1:])], x.dtype) for x in segment.inputs]
    masks = [None if mask is None else tf.TensorSpec([None, *_sizes(mask)[1:]], mask.dtype) for mask in masks]

    def added(state: Any, tensors: Any, masks: Any) -> Any:
        losses = segment.added_losses(weights, state, tensors, masks, training)
        return [tf.cast(tf.reduce_sum(each), tf.float32) for each in losses]

    function = tf.function(added, autograph=False).get_concrete_function(specs_of(state), specs, masks)
    tensors, given = [_sample(spec, n) for n, spec in enumerate(specs)], [_ones(mask) for mask in masks]

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
