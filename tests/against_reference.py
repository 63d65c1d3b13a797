"""Asynchronous training compared with the NumPy reference."""

from __future__ import annotations

from functools import cache

import keras
import networks
import reference
from keras import optimizers

ASYNCHRONOUS = ("vanilla", "weight-stashing", "vertical-sync", "spectrain")


LATER = ("local", "fitted", "spike-compensation", "2bw")  # tried with fewer numbers of stages


BATCH = 16


PREDICTED = {
    "plain": (lambda rate: optimizers.SGD(rate), reference.Sgd(0.0)),
    "momentum": (lambda rate: optimizers.SGD(rate, momentum=0.9), reference.Sgd()),
    "nesterov": (lambda rate: optimizers.SGD(rate, momentum=0.9, nesterov=True), reference.Sgd(nesterov=True)),
    "decay": (lambda rate: optimizers.SGD(rate, momentum=0.9, weight_decay=0.1), reference.Sgd(decay=0.1)),
    "adam": (lambda rate: optimizers.Adam(rate), reference.Adam()),
    "adamw": (lambda rate: optimizers.AdamW(rate, weight_decay=0.1), reference.Adam(decay=0.1)),
    "rmsprop": (lambda rate: optimizers.RMSprop(rate), reference.RmsProp()),
    "rmsprop momentum": (lambda rate: optimizers.RMSprop(rate, momentum=0.9), reference.RmsProp(0.9)),
}


def minibatches(x, y):
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]


def compare(settings, stages, optimizer, **options):
    """Two fits, a drain between them, against the reference."""
    x, y = networks.data(rows=24 * BATCH)
    model = networks.mlp()
    state = reference.State([tuple(layer.get_weights()) for layer in model.layers])
    settings, options = reference.chosen(settings, stages, options)
    pm = networks.pipeline(model, optimizer, cuts=networks.cuts(6, stages), **options)
    for _ in range(2):
        pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        reference.train(settings, state, networks.ends(6, stages), minibatches(x, y))
        networks.assert_close(model.get_weights(), [array for layer in state.layers for array in layer])


def constantly(rate):
    return lambda t: rate


@cache
def plain_keras(rows):
    """Weights and history of the MLP by itself, the same for every pipeline that is compared with it."""
    plain, (x, y) = networks.mlp(), networks.data(rows=rows)
    plain.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=networks.crossentropy(), metrics=["accuracy"])
    history = plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2).history
    return plain.get_weights(), history
