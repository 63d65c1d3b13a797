"""What a program's function gives of a minibatch, joined from what the last stage has made of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.program.stage_trace import Output


class MinibatchResult(NamedTuple):
    """A minibatch's loss, a number or one for every row, and the model's outputs, on this process's device."""

    loss: tf.Tensor
    predictions: BoundaryTensors


class ProgramResult(NamedTuple):
    """What comes of some minibatches, and what the next function of a course goes on with.

    ``finite`` says whether all gradients were, where steps with others are skipped. ``times`` are times of day, see
    ``Clock``, which notes ``sizes``, too. ``snapshots`` are weights and state, by minibatch and stage.
    """

    minibatches: list[MinibatchResult]
    finite: tf.Tensor | None
    times: tf.Tensor | None
    sizes: tf.Tensor | None
    snapshots: list[Any]
    held: list[tf.Tensor]


def joined_loss(outputs: Sequence[Output]) -> tf.Tensor:
    """A minibatch's loss from those of its parts: ``sum(share of the loss * loss + share of the rows * penalty)``.

    Losses of single rows are concatenated, each with the penalty added.
    """
    terms = [_scaled(each.loss, each.share.of_loss) for each in outputs]
    added = [_scaled(each.penalty, each.share.of_minibatch) for each in outputs if each.penalty is not None]
    if terms[0].shape.rank:
        return sum(added, start=tf.concat(terms, axis=0))
    terms += added
    return terms[0] if len(terms) == 1 else tf.add_n(terms)


def _scaled(value: tf.Tensor, factor: Any) -> tf.Tensor:
    value = tf.cast(value, tf.float32)
    return value if isinstance(factor, float) and factor == 1.0 else value * factor


def joined_predictions(parts: Sequence[BoundaryTensors]) -> BoundaryTensors:
    """The rows of all parts one after another."""
    tensors, masks = (zip(*each, strict=True) for each in zip(*parts, strict=True))
    return BoundaryTensors([_whole(rows) for rows in tensors], [_whole(rows) for rows in masks])


def _whole(rows: Sequence[Any]) -> Any:
    return rows[0] if len(rows) == 1 or rows[0] is None else tf.concat(rows, 0)
