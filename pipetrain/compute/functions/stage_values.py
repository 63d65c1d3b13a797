"""What goes into a stage's functions, and what comes out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class BoundaryTensors(NamedTuple):
    """What crosses a cut: tensors, and the Keras mask that each carries (None for most)."""

    tensors: list[tf.Tensor]
    masks: list[tf.Tensor | None]


class Forward(NamedTuple):
    """What a stage's forward gives: its outputs, the loss (last stage), its layers' own losses, and ``kept``.

    The loss is a number, or one for every example where it is not to be reduced. ``kept`` is for its backward, None
    where none will come.
    """

    output: BoundaryTensors
    loss: tf.Tensor | None
    penalty: tf.Tensor | None
    kept: SavedForBackward | None


class SavedForBackward(NamedTuple):
    """What a forward leaves for its backward: packed residuals, or with recomputation what to make them from anew.

    ``weights`` are forward's where they are not backward's too; ``inputs`` end with what was drawn, if anything was.
    """

    residuals: list[tf.Tensor] | None
    weights: list[tf.Tensor] | None = None
    state: Sequence[tf.Tensor] = ()
    inputs: Any = None


class Inputs(NamedTuple):
    """What a forward takes beside weights: what crosses the cut and, for the last stage, labels and sample weights."""

    values: BoundaryTensors
    targets: Any = None


class Step(NamedTuple):
    """What an update takes beside gradients, whose staleness it is; a rate of None leaves a schedule to itself."""

    learning_rate: float | None
    staleness: int = 0


class BackwardResult(NamedTuple):
    """What a backward gives: gradients of the weights, None where it updated by them, and of inputs that want one.

    Of a forward in the same call what that gives, and when it was done (``time.perf_counter``), where that is known.
    """

    gradients: list[Any] | None
    by_input: list[tf.Tensor]
    forward: Forward | None = None
    forward_end_s: float | None = None
