"""Optimizers by the names that the command lines use."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        from pipetrain import AttentiveMuon

        return AttentiveMuon(learning_rate)
    return keras.optimizers.SGD(learning_rate, momentum, nesterov=name == "nesterov")
