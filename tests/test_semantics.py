"""Asynchronous schemes against the NumPy reference; synchronous ones against plain Keras."""

from __future__ import annotations

import keras
import networks
import numpy as np
import pytest
import reference

ASYNCHRONOUS = ("vanilla", "weight-stashing", "vertical-sync", "spectrain")
BATCH = 16


def minibatches(x, y):
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("scheme", ASYNCHRONOUS)
def test_asynchronous_schemes_equal_the_reference(scheme, stages):
    x, y = networks.data(rows=28 * BATCH)
    model = networks.mlp()
    layers = [tuple(layer.get_weights()) for layer in model.layers]
    pm = networks.pipeline(model, scheme=scheme, cuts=networks.cuts(6, stages))
    velocity = None
    for part in (slice(0, 28 * BATCH), slice(0, 27 * BATCH)):  # two fits, a drain between them
        pm.fit(x[part], y[part], batch_size=BATCH, shuffle=False, verbose=0)
        layers, velocity = reference.train(
            scheme, layers, networks.ends(6, stages), minibatches(x[part], y[part]), 0.05, 0.9, velocity
        )
        networks.assert_close(model.get_weights(), [array for layer in layers for array in layer])


@pytest.mark.parametrize("epochs", [3])
def test_an_epoch_is_a_drain(epochs):
    x, y = networks.data(rows=10 * BATCH)
    once, thrice = (networks.pipeline(networks.mlp()) for _ in range(2))
    once.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=epochs)
    for _ in range(epochs):
        thrice.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    networks.assert_equal(once.get_weights(), thrice.get_weights())


@pytest.mark.parametrize("microbatches", [1, 3, 4, 7])
@pytest.mark.parametrize("stages", [1, 2, 4, 6])
@pytest.mark.parametrize("scheme", ["gpipe", "1f1b"])
def test_synchronous_schemes_equal_plain_keras(scheme, stages, microbatches):
    x, y = networks.data(rows=5 * BATCH + 9)  # the last batch is short
    plain, model = networks.mlp(), networks.mlp()
    plain.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=networks.crossentropy(), metrics=["accuracy"])
    pm = networks.pipeline(model, scheme=scheme, cuts=networks.cuts(6, stages), microbatches=microbatches)
    expected = plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2)
    history = pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2)
    networks.assert_close(model.get_weights(), plain.get_weights())
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5)
