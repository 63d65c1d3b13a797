"""How a minibatch's loss follows from those of its parts, as far as the losses themselves tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras

from pipetrain.compute.keras_private import axis_of

# A minibatch's loss is the mean of its parts', weighted by their rows; or their sum; or the sum of what they have of
# it when each is told by what all of it is divided.
Way = Literal["mean", "sum", "divided"]
Divisor = Literal["nothing", "rows", "entries", "weights"]

WHOLE_BATCH = ("Dice", "Tversky", "Circle", "dice", "tversky", "circle")  # which look at all rows at once
HINGES = ("Hinge", "SquaredHinge", "hinge", "squared_hinge")  # which take 0 for -1 if all labels are 0 or 1
BY_LABELS = ("crossentropy", "ce")  # names by which Keras takes the one that fits the labels


def ways(loss: Any, parts: int, outputs: Sequence[Any], are_masked: bool = False) -> list[Way]:
    """How the loss of several parts of a minibatch may be put together: one way, or several of which a trial tells.

    What is not reduced is summed where gradients start from it, as in Keras. Raises ValueError for losses of which some
    are reduced and others are not, where a minibatch has several parts. ``outputs`` are the model's; ``are_masked``:
    whether they have masks that are known beforehand.
    """
    losses = [_resolved(each) for each in keras.tree.flatten(loss) if each is not None]
    reductions = {_reduction(each) for each in losses}
    if reductions in ({"sum"}, {"none"}):
        found: list[Way] = ["sum"]
    elif parts == 1 or not reductions - {"mean"}:
        found = ["mean"]
    else:
        found = ["divided"]
    if parts > 1 and "none" in reductions and len(reductions) > 1:
        raise ValueError(
            "The loss of a batch cannot be put together from those of its microbatches and replicas. "
            f"Received: reduction={sorted(reductions)} for {parts} parts of a batch. "
            "Try reduction='sum_over_batch_size', or microbatches=1 and one replica of the last stage."
        )
    divided = are_masked or any(ignored_class(each) is not None for each in losses)
    if parts > 1 and divided and reductions - {"none", "sum"}:
        found = ["divided"]
    if parts > 1 and found != ["divided"] and not is_known(loss, outputs):
        others: list[Way] = ["mean", "sum"]
        found += [each for each in others if each not in found]
    return found


def divides(loss: Any) -> bool:
    """Whether Keras divides some loss by a number of entries, which a mask makes smaller."""
    losses = [_resolved(each) for each in keras.tree.flatten(loss) if each is not None]
    return any(_reduction(each) not in ("sum", "none") for each in losses)


def divides_by(loss: keras.losses.Loss, sample_weight: Any, is_masked: bool) -> Divisor:
    """By what a loss divides the sum over a minibatch's entries that are not masked."""
    reduction = _reduction(loss)
    if reduction in ("sum", "none"):
        return "nothing"
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        return "weights"
    return "entries" if is_masked or ignored_class(loss) is not None else "rows"


def ignored_class(loss: Any) -> int | None:
    """The label of entries that a loss leaves out, and does not count."""
    return loss.ignore_class if isinstance(loss, keras.losses.SparseCategoricalCrossentropy) else None


def is_known(loss: Any, outputs: Sequence[Any]) -> bool:
    """Whether all are losses of Keras' that look at one row at a time; of others only a trial tells.

    Of an output with a number for each row, and no more dimensions, they take the mean of all rows.
    """
    by_rows = all(each is None or _goes_by_rows(_resolved(each)) for each in keras.tree.flatten(loss))
    return by_rows and all(len(each.shape) > 1 for each in outputs)


def hinges(loss: Any) -> list[bool]:
    """Which of the losses take labels of 0 and 1 for -1 and 1, if a batch has no others."""
    return [_name(_resolved(each)) in HINGES for each in keras.tree.flatten(loss)]


def _goes_by_rows(loss: Any) -> bool:
    name, own = _name(loss), type(loss) if isinstance(loss, keras.losses.Loss) else loss
    is_own = loss in BY_LABELS or getattr(keras.losses, name, None) is own
    return is_own and name not in WHOLE_BATCH and axis_of(loss) == -1


def _name(loss: Any) -> str:
    """The name of a class of losses, or of a function."""
    return type(loss).__name__ if isinstance(loss, keras.losses.Loss) else getattr(loss, "__name__", str(loss))


def _resolved(loss: Any) -> Any:
    """The loss that Keras has under a name; what it chooses by the labels stays a name."""
    is_name = isinstance(loss, str) and loss.lower() not in BY_LABELS
    return keras.losses.get(loss) if is_name else loss.lower() if isinstance(loss, str) else loss


def _reduction(loss: Any) -> str:
    """How a loss is reduced; what is no ``Loss``, Keras makes one that is the mean."""
    reduction = loss.reduction if isinstance(loss, keras.losses.Loss) else "mean"
    return {"sum_over_batch_size": "mean", None: "none"}.get(reduction, reduction)
