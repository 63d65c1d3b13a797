"""One step of a stage's optimizer on its own weights, by gradients of a loss that was multiplied."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.functions.constants import Constants
from pipetrain.compute.functions.stage_values import Step
from pipetrain.compute.functions.weight_group import WeightGroup
from pipetrain.compute.optimizer.clipping import clipped, limit
from pipetrain.compute.optimizer.loss_scaling import SCALE, is_dynamic, stepping, unscaled

Numbers = tuple[tf.Tensor | None, tf.Tensor | None]  # of a step: staleness and loss scale, None where it has no use


class UpdateStep:
    """What a function does with a stage's gradients to update its weights: unscale, clip, and apply them.

    Args:
        optimizer: the compiled one.
        own: the weights that only this stage updates.
        constants: makes tensors of numbers.

    ``global_clipnorm`` is the norm to which the gradients of all stages together are clipped, None if they are not.
    ``numbers`` are the specs of a step's numbers, ``scale`` that of the second alone.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, own: WeightGroup, constants: Constants) -> None:
        steps = stepping(optimizer)
        self.own, self.global_clipnorm, self._constants = own, limit(steps.global_clipnorm), constants
        self.scale = SCALE if is_dynamic(optimizer) or steps.loss_scale_factor is not None else None
        self.numbers = tf.TensorSpec([]) if own.rule.corrects else None, self.scale

    @property
    def handles(self) -> list[tf.Tensor]:
        """Those of the variables that it updates."""
        return [variable.value.handle for variable in self.own.variables]

    def numbers_of(self, step: Step) -> Numbers:
        """The numbers as tensors, kept for later calls."""
        staleness = self._constants(float(step.staleness), tf.float32) if self.own.rule.corrects else None
        return staleness, self._constants(step.loss_scale, SCALE.dtype) if self.scale is not None else None

    def apply(self, gradients: list[Any], squared_norms: tf.Tensor | None, numbers: Numbers) -> None:
        """Update the stage's own weights by their gradients."""
        staleness, scale = numbers
        self.own.update.apply(self.prepared(gradients, squared_norms, scale), staleness)

    def prepared(self, gradients: list[Any], squared_norms: tf.Tensor | None, scale: tf.Tensor | None) -> list[Any]:
        """The gradients of the loss itself, clipped if the ``squared_norms`` of all stages' gradients are given."""
        gradients = gradients if scale is None else unscaled(gradients, scale)
        if squared_norms is None or not self.global_clipnorm:
            return gradients
        return clipped(gradients, squared_norms, self.global_clipnorm)
