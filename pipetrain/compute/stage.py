"""One stage: a segment of the model on one device, with its own copy of the weights and its own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.blocks import Segment
from pipetrain.compute.bound import Weights, bind, direct
from pipetrain.compute.split import specs, split
from pipetrain.compute.update import Update

_UNTRACED = object()
LossFunction = Callable[[Any, tf.Tensor, Any], tf.Tensor]


class Forward(NamedTuple):
    """What a stage's forward gives: its output, the loss (last stage), its regularization penalty, the residuals."""

    output: tf.Tensor
    loss: tf.Tensor | None
    penalty: tf.Tensor | None
    residuals: list[tf.Tensor]


class Stage:
    """A run of blocks on one device, its weights in variables that only this stage updates.

    Between ``load`` and ``store`` the weights and state of these blocks live here; outside, in the model.

    Args:
        segment: the blocks.
        device: a TensorFlow device name.
        optimizer: the compiled optimizer, of which the stage takes a clone over its own variables.
        first: whether the input is the data, which wants no gradient.
        loss: ``loss(y, output, sample_weight)`` for the last stage, None for the others.
    """

    def __init__(
        self,
        segment: Segment,
        device: str,
        optimizer: keras.optimizers.Optimizer,
        *,
        first: bool,
        loss: LossFunction | None,
    ) -> None:
        self.segment, self.device, self._loss = segment, device, loss
        self._flowing = not first and tf.as_dtype(segment.input_tensor.dtype).is_floating
        self._weights, self._model_state = segment.trainable_variables, segment.non_trainable_variables
        with tf.device(device):
            self.variables = [_like(variable) for variable in self._weights]
            self.optimizer = clone(optimizer)
            self.optimizer.build(self.variables)
            self._optimizer_step = Update(self.optimizer, self.variables)
        self._state: list[tf.Tensor] = []
        self._traced_for: Any = _UNTRACED
        self._learning_rate: float | None = None

    def load(self) -> None:
        """Take weights and state from the model."""
        with tf.device(self.device):
            for mine, original in zip(self.variables, self._weights, strict=True):
                mine.assign(original.value)
            self._state = [tf.identity(variable.value) for variable in self._model_state]

    def store(self, snapshot: Sequence[tf.Tensor] | None = None) -> None:
        """Hand weights and state, as they are or as in a snapshot, to the model."""
        values = self.snapshot() if snapshot is None else snapshot
        for variable, value in zip([*self._weights, *self._model_state], values, strict=True):
            variable.assign(value)

    def snapshot(self) -> list[tf.Tensor]:
        """The weights and the state as they are; later updates leave these tensors alone."""
        return [*self.weights(), *self._state]

    def weights(self) -> list[tf.Tensor]:
        """The newest weights. Holding the tensors keeps this version: a later update then writes elsewhere."""
        with tf.device(self.device):
            return [variable.value.read_value() for variable in self.variables]

    def trace(self, targets: Any = None) -> None:
        """Trace forward and backward, once for each structure of targets (specs of y and sample weights)."""
        if self._traced_for == targets:
            return
        tensor = self.segment.input_tensor
        flows, constants = self._inputs(tf.TensorSpec(tensor.shape, tensor.dtype), targets)
        with tf.device(self.device):
            halves = split(self._run, specs(self._weights), specs(self._model_state), flows, constants)
            self._forward, self._backward = bind(halves, self.variables, self._optimizer_step.velocity)
            self._starts = halves.outputs
            update = tf.function(self._optimizer_step.apply, autograph=False)
            self._update = direct(update.get_concrete_function(halves.backward.structured_outputs[0]))
        self._traced_for = targets

    def forward(self, weights: Weights, x: tf.Tensor, targets: Any = None) -> Forward:
        """Run the blocks with these weights and the stage's current state, which moves on."""
        flows, constants = self._inputs(x, targets)
        with tf.device(self.device):
            aux, residuals = self._forward(weights, self._state, flows, constants)
        output, loss, penalty, self._state = aux
        return Forward(output, loss, penalty, residuals)

    def backward(
        self, weights: Weights, residuals: list[tf.Tensor], gradient: tf.Tensor | float | None, share: float
    ) -> tuple[list[Any], tf.Tensor | None]:
        """Gradients of the weights and of the stage's input, with these weights and forward's residuals.

        ``gradient`` is that of the output (of the loss, for the last stage; None for an integer output),
        ``share`` that of the penalty.
        """
        starts = [share] if gradient is None else [gradient, share]
        with tf.device(self.device):
            output_gradients = [
                tf.convert_to_tensor(start, spec.dtype) for start, spec in zip(starts, self._starts, strict=False)
            ]
            by_weight, by_flow = self._backward(weights, residuals, output_gradients)
        return by_weight, by_flow[0] if by_flow else None

    def accumulate(self, total: list[Any] | None, gradients: list[Any]) -> list[Any]:
        """The sum of two lists of gradients."""
        if total is None:
            return gradients
        with tf.device(self.device):
            return [_add(a, b) for a, b in zip(total, gradients, strict=True)]

    def update(self, gradients: list[Any], learning_rate: float | None) -> None:
        """One step of the stage's optimizer: one more version. ``learning_rate`` None leaves a schedule to itself."""
        with tf.device(self.device):
            if learning_rate is not None and learning_rate != self._learning_rate:
                self.optimizer.learning_rate = self._learning_rate = learning_rate
            if self.variables:
                self._update(gradients)

    def _inputs(self, x: Any, targets: Any) -> Any:
        return ([x], (None, targets)) if self._flowing else ([], (x, targets))

    def _run(self, weights: Any, state: Any, flows: Any, constants: Any) -> Any:
        data, targets = constants
        x = flows[0] if flows else data
        output, state, penalties = self.segment.stateless_call(weights, state, x, training=True, return_losses=True)
        penalty = tf.add_n(penalties) if penalties else None
        loss = self._loss(targets[0], output, targets[1]) if self._loss else None
        main = output if loss is None else loss
        flowing = [main] if main.dtype.is_floating else []
        return flowing if penalty is None else [*flowing, penalty], (output, loss, penalty, state)


def clone(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """An optimizer with the same settings and no slots yet; a learning-rate schedule, being stateless, is shared."""
    config = optimizer.get_config()
    if isinstance(config["learning_rate"], dict):
        config["learning_rate"] = optimizer._learning_rate
    return type(optimizer).from_config(config)


def _like(variable: keras.Variable) -> keras.Variable:
    value = tf.convert_to_tensor(variable.value)  # given a tf.Variable, Keras would share it
    copy = keras.Variable(value, trainable=True, dtype=variable.dtype, name=variable.name)
    copy.constraint = variable.constraint
    return copy


def _add(a: Any, b: Any) -> Any:
    """The sum of two gradients of one weight: both None, both tensors, or both rows of an embedding."""
    if a is None:
        return None
    if isinstance(a, tf.IndexedSlices):
        values, indices = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
        return tf.IndexedSlices(values, indices, a.dense_shape)
    return a + b
