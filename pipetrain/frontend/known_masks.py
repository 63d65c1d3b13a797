"""Masks of a model's outputs that its inputs alone decide on, such as where sequences are padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.keras_private import mask_of

Masks = Callable[[Sequence[tf.Tensor]], list[Any]]  # of a minibatch's inputs those of all outputs, None for some


def are_masked(model: keras.Model) -> list[bool]:
    """Which of the outputs carry a mask, as far as the model's own graph has it."""
    return [mask_of(each) is not None for each in model.outputs]


def masks_from_inputs(model: keras.Model) -> Masks | None:
    """A function of the inputs that gives the masks; None if there are none, or weights or chance have a part in one.

    A mask that is not of the shape of its output without the last dimension is not meant for the entries of a loss.
    """
    masks = {n: mask_of(each) for n, each in enumerate(model.outputs) if mask_of(each) is not None}
    if not masks or not all(_fits(mask, model.outputs[n]) for n, mask in masks.items()):
        return None
    of_inputs = keras.Function(model.inputs, list(masks.values()))
    if any(getattr(each, "variables", None) for each in of_inputs.operations):
        return None

    def given(inputs: Sequence[tf.Tensor]) -> list[Any]:
        found = dict(zip(masks, of_inputs(list(inputs)), strict=True))
        return [found.get(n) for n in range(len(model.outputs))]

    return given


def _fits(mask: Any, output: Any) -> bool:
    return tf.TensorShape(mask.shape[1:]).is_compatible_with(output.shape[1:-1])
