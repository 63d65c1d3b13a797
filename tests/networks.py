"""Small networks and data for the tests."""

from __future__ import annotations

import keras
import numpy as np

import pipetrain

FEATURES, CLASSES = 12, 5


def mlp(depth=6, width=16, seed=0):
    """A tanh MLP: ``depth`` dense layers named d0, d1, ..."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(width, activation="tanh", name=f"d{n}") for n in range(depth - 1)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES, name=f"d{depth - 1}")])


def ends(depth, stages):
    """As even as can be: the index after each stage's last layer."""
    return [depth * (n + 1) // stages for n in range(stages)]


def cuts(depth, stages):
    return [f"d{end - 1}" for end in ends(depth, stages)[:-1]]


def data(rows=400, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES)).astype("float32")
    y = np.argmax(x @ rng.normal(size=(FEATURES, CLASSES)), axis=1).astype("int32")
    return x, y


def crossentropy(**settings):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def pipeline(model=None, optimizer=None, **settings):
    """A compiled PipelineModel, the MLP in four stages unless told otherwise."""
    model = mlp() if model is None else model
    if "stages" not in settings and "cuts" not in settings:
        settings["cuts"] = cuts(6, 4)
    pm = pipetrain.PipelineModel(model, **settings)
    pm.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss=crossentropy(), metrics=["accuracy"])
    return pm


def assert_close(actual, expected, tolerance=1e-5):
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def assert_equal(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(got, want)
