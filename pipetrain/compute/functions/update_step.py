"""What a stage does with a minibatch's gradients once they are complete: summarize them, and update by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import updated_one_by_one
from pipetrain.compute.functions.kernels import Kernels
from pipetrain.compute.functions.stage_values import Constants, Step
from pipetrain.compute.functions.weight_groups import WeightGroup
from pipetrain.compute.functions.weight_products import counted, made, of_parts
from pipetrain.compute.optimizer.gradient_scaling import (
    SCALE,
    SQUARED_NORM,
    all_finite,
    clipped,
    is_dynamic,
    limit,
    squared_norm,
    stepping,
    unscaled,
)

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


class CompleteGradients:
    """The functions of complete gradients, each traced when it is first needed.

    Gradients of weights that several stages have are sums over all stages at the first of them, and None at the others.

    Args:
        step: how the stage's own weights are updated.
        like: the specs of the gradients that a backward gives.
        shared: the groups of weights that other stages have too.
        kernels: what runs them.
    """

    def __init__(self, step: UpdateStep, like: Sequence[Any], shared: Sequence[WeightGroup], kernels: Kernels) -> None:
        self._step, self._gradients, self._kernels = step, list(like), kernels
        self._summed = [n for group in shared for n in group.numbers]
        self._updates: dict[int, Any] = {}  # by the number of microbatches
        self._squared_norm: Any = None
        self._all_finite: Any = None

    def squared_norm(self, gradients: list[Any], step: Step) -> tf.Tensor:
        """The squared norm of the gradients of the loss itself, a part of that of all stages."""
        _, scale = self._step.numbers_of(step)
        if self._squared_norm is None:
            self._squared_norm = self._kernels.op(self._norm, self._like(gradients), self._step.scale)
        return self._squared_norm(gradients, scale)

    def _norm(self, gradients: list[Any], scale: tf.Tensor | None) -> tf.Tensor:
        return squared_norm(self._step.prepared(gradients, None, scale))

    def all_finite(self, gradients: list[Any]) -> tf.Tensor:
        """Whether every element of the gradients is finite."""
        if self._all_finite is None:
            self._all_finite = self._kernels.op(all_finite, self._like(gradients))
        return self._all_finite(gradients)

    def _like(self, gradients: list[Any]) -> list[Any]:
        """The specs of these gradients, of which those of shared weights are sums over stages, or None."""
        like = list(self._gradients)
        for n in self._summed:
            like[n] = None if gradients[n] is None else tf.type_spec_from_value(gradients[n])
        return like

    def prepared(self, gradients: list[Any], step: Step, squared_norms: tf.Tensor | None) -> list[Any]:
        """The gradients of the loss itself, from those of the loss that was multiplied; clipped as in ``update``."""
        _, scale = self._step.numbers_of(step)
        return self._step.prepared(gradients, squared_norms, scale)

    def update(self, gradients: list[Any], step: Step, squared_norms: tf.Tensor | None) -> None:
        """One step of the optimizer on the stage's own weights, which makes their next version."""
        own = self._step.own
        own.set_rate(step.learning_rate)
        if own.variables:
            gradients = [gradients[n] for n in own.numbers]
            microbatches = counted(gradients)
            if microbatches not in self._updates:
                self._updates[microbatches] = self._traced(microbatches)
            self._updates[microbatches](gradients, squared_norms, self._step.numbers_of(step))
            own.updated()

    def _traced(self, microbatches: int) -> Any:
        """The update, where products have the factors of so many microbatches."""
        squares = tf.TensorSpec([None], SQUARED_NORM.dtype) if self._step.global_clipnorm else None
        gradients = of_parts([self._gradients[n] for n in self._step.own.numbers], microbatches)
        return self._kernels.op(self._one_by_one, gradients, squares, self._step.numbers)

    def _one_by_one(self, gradients: list[Any], squared_norms: tf.Tensor | None, numbers: Numbers) -> None:
        gradients = made(gradients)
        self._step.apply(gradients, squared_norms, numbers)
        updated_one_by_one(gradients, self._step.handles)
