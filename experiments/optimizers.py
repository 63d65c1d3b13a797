"""Optimizers by the names that the command lines use."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

# Steps of about the learning rate's size, whatever the gradients'; and Keras' names.
ADAPTIVE = {"adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop", "lion": "Lion", "muon": "Muon"}
ATTENTIVE = "muon+attention"
ADAPTIVE_NAMES = (*ADAPTIVE, ATTENTIVE)
NAMES = ("sgd", "momentum", "nesterov", *ADAPTIVE_NAMES)
ADAPTIVE_RATE = 1e-3  # Keras' default for them


def build(name: str, learning_rate: float, momentum: float) -> keras.optimizers.Optimizer:
    """A new optimizer; ``momentum`` counts for ``momentum`` and ``nesterov``. ValueError for an unknown name."""
    import keras

    if name not in NAMES:
        raise ValueError(f"Unknown optimizer. Received: optimizer={name!r}. Try one of: {', '.join(NAMES)}.")
    if name == "sgd":
        return keras.optimizers.SGD(learning_rate)
    if name in ADAPTIVE:
        return getattr(keras.optimizers, ADAPTIVE[name])(learning_rate)
    if name == ATTENTIVE:
        return attentive_muon()(learning_rate)
    return keras.optimizers.SGD(learning_rate, momentum, nesterov=name == "nesterov")


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of an attention's kernel, (width, heads, size) or (heads, size, width), with its heads joined.

    Where the width is neither ``heads * size`` nor known, the first axis is taken for it.
    """
    first, second, third = shape
    return (first * second, third) if first != second * third and first * second == third else (first, second * third)


@cache
def attentive_muon() -> type[keras.optimizers.Optimizer]:
    """Keras' Muon, of attentions' kernels too, which Keras' own leaves to AdamW because they have three axes.

    Of these, a matrix with its heads joined is made orthogonal. Embeddings and all that has one axis stay with AdamW.
    Biases of queries, keys and values, and positions, have two axes and are matrices, as for Keras' own.
    """
    import keras

    @keras.saving.register_keras_serializable("pipetrain_experiments")
    class AttentiveMuon(keras.optimizers.Muon):
        def _should_use_adamw(self, variable: Any) -> bool:
            kernel = SimpleNamespace(shape=variable.shape[:2], path=variable.path)  # as if it had two axes
            return super()._should_use_adamw(kernel if len(variable.shape) == 3 else variable)

        def zeropower_via_newtonschulz5(self, x: Any, steps: int) -> Any:
            if len(x.shape) == 2:
                return super().zeropower_via_newtonschulz5(x, steps)
            matrix = keras.ops.reshape(x, matrix_shape(tuple(x.shape)))
            return keras.ops.reshape(super().zeropower_via_newtonschulz5(matrix, steps), x.shape)

        def lr_adjust(self, x: Any) -> Any:
            longer = max(x.shape if len(x.shape) == 2 else matrix_shape(tuple(x.shape)))
            return x if self.rms_rate is None else x * (longer**0.5 * self.rms_rate)

    return AttentiveMuon
