"""The self-normalizing network: a deep stack of dense SELU layers."""

from __future__ import annotations

import keras


def snn(input_shape: tuple[int, ...], classes: int, depth: int = 32, width: int = 2048) -> keras.Model:
    """``depth`` dense layers of ``width`` units with SELU and LeCun-normal weights, then a dense layer of logits.

    Inputs should have zero mean and unit variance, which every layer then keeps. The paper trains 32 x 2048.
    Sources: Klambauer et al. 2017 (arXiv 1706.02515); as a benchmark, Chen et al. 2018 (arXiv 1809.02839).

    Args:
        input_shape: shape of one example, flattened first.
        classes: number of logits.
        depth: hidden layers.
        width: units of each.
    """
    inputs = keras.Input(input_shape)
    x = keras.layers.Flatten(name="flatten")(inputs) if len(input_shape) > 1 else inputs
    for n in range(depth):
        x = keras.layers.Dense(width, activation="selu", kernel_initializer="lecun_normal", name=f"dense_{n}")(x)
    return keras.Model(inputs, keras.layers.Dense(classes, name="logits")(x), name="snn")
