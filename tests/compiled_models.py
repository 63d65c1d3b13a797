"""Models of every kind of layer that XLA compiles."""

from __future__ import annotations

import keras
import networks
import numpy as np

L = keras.layers


def layered(*layers, shape, dtype="float32"):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers, L.Dense(5)])


MODELS = {
    "dropout and BatchNormalization": lambda: layered(
        L.Dense(8, "relu"), L.BatchNormalization(), L.Dropout(0.3, seed=1), L.Dense(8, "relu"), shape=(6,)
    ),
    "convolutions": lambda: layered(
        L.Conv2D(4, 3, padding="same", use_bias=False),
        L.BatchNormalization(),
        L.MaxPooling2D(),
        L.Flatten(),
        shape=(6, 6, 2),
    ),
    "an embedding": lambda: layered(
        L.Embedding(20, 8), L.LayerNormalization(), L.Flatten(), L.Dense(8), shape=(7,), dtype="int32"
    ),
    "masks and recurrence": lambda: layered(
        L.Embedding(20, 8, mask_zero=True), L.Dense(8), L.LSTM(6), L.Dense(8), shape=(7,), dtype="int32"
    ),
}


def made(name):
    networks.draw_from(0)
    return MODELS[name]()


def inputs(model):
    rng = np.random.default_rng(0)
    tensor = model.inputs[0]
    shape = (44, *tensor.shape[1:])
    numbers = rng.integers(0, 20, shape) if tensor.dtype == "int32" else rng.normal(size=shape)
    return numbers.astype(tensor.dtype), rng.integers(0, 5, 44)
