"""How a minibatch's loss follows from those of its rows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.keras_private import is_own

WHOLE_BATCH = (keras.losses.Dice, keras.losses.Tversky, keras.losses.Circle)  # which look at all rows at once


def loss_is_mean(loss: Any, parts: int) -> bool:
    """Whether the loss is the mean over the rows (True), or the sum of theirs, or not reduced (False).

    What is not reduced is summed where gradients start from it, as in Keras. Where microbatches or replicas of the last
    stage divide the rows into parts, a minibatch's loss must follow from theirs: ValueError for other reductions, and
    for several of them at once.
    """
    reductions = {_reduction(each) for each in keras.tree.flatten(loss) if each is not None}
    if reductions in ({"sum"}, {"none"}):
        return False
    if parts > 1 and not reductions <= {"mean"}:
        raise ValueError(
            "The loss of a batch cannot be put together from those of its microbatches and replicas. "
            f"Received: reduction={sorted(map(str, reductions))} for {parts} parts of a batch. "
            "Try reduction='sum_over_batch_size', or microbatches=1 and one replica of the last stage."
        )
    return True


def _reduction(loss: Any) -> str:
    """How a loss is reduced; what is no ``Loss``, Keras makes one that is the mean."""
    reduction = loss.reduction if isinstance(loss, keras.losses.Loss) else "mean"
    return {"sum_over_batch_size": "mean", None: "none"}.get(reduction, reduction)


def is_measured(loss: Any) -> bool:
    """Whether only trying tells what a loss of several rows has to do with those of each."""
    return any(
        inspect.isfunction(each) or (isinstance(each, keras.losses.Loss) and not _goes_by_rows(each))
        for each in keras.tree.flatten(loss)
    )


def _goes_by_rows(loss: keras.losses.Loss) -> bool:
    """Whether this is a loss of Keras' that looks at one row at a time."""
    return is_own(type(loss)) and not isinstance(loss, WHOLE_BATCH)


def measured_mean(loss: Callable[..., tf.Tensor], targets: Any, outputs: Sequence[Any]) -> bool:
    """``loss_is_mean`` of functions that give one number for all rows, by that of two rows and of each alone.

    ``targets`` are the specs of labels and sample weights. Raises ValueError for neither a mean nor a sum.
    """

    def of(*rows: float) -> float:
        def column(spec: Any, values: Sequence[float]) -> Any:
            wide = tf.reshape(tf.constant(values), [-1] + [1] * (len(spec.shape) - 1))
            return tf.cast(tf.tile(wide, [1, *(size or 1 for size in spec.shape[1:])]), spec.dtype)

        ones = [1.0] * len(rows)
        y, sample_weight = tf.nest.map_structure(lambda spec: None if spec is None else column(spec, ones), targets)
        with keras.StatelessScope():
            return float(tf.reduce_sum(loss(y, [column(output, rows) for output in outputs], sample_weight)))

    both, alone = of(0.25, 0.75), of(0.25) + of(0.75)
    is_mean = math.isclose(both, alone / 2, rel_tol=1e-3, abs_tol=1e-6)
    if not is_mean and not math.isclose(both, alone, rel_tol=1e-3):
        raise ValueError(
            "The loss of a batch cannot be put together from its parts': it is neither a mean nor a sum over "
            f"the rows. Received: a loss of {both:.6g} for two rows that have {alone:.6g} together one by one. "
            "Try microbatches=1 and one replica of the last stage."
        )
    return is_mean
