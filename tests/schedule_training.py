"""Pipelines of several stages a device, or with backwards in halves, and what they train against plain Keras."""

from __future__ import annotations

from functools import cache

import keras
import networks
import numpy as np

from pipetrain.schemes.table import SCHEDULED


def pipelined(model, scheme, devices, chunks=None, **settings):
    """The model as a pipeline of so many devices with as many stages each as the scheme has.

    ``interleaved/3`` is a scheme with its number of stages a device.
    """
    scheme, _, named = scheme.partition("/") if scheme.split("/")[0] in SCHEDULED else (scheme, "", "")
    chunks = int(named) if named else chunks
    each = chunks or (SCHEDULED[scheme].schedule.chunks if scheme in SCHEDULED else 1)
    places = tuple(f"CPU:{n}" for n in range(devices))
    stages = None if "cuts" in settings else devices * each
    return networks.in_way(model, stages, scheme, chunks=chunks, devices=places, **settings)


def trained(model, data, optimizer=None, epochs=2, **settings):
    """The model compiled and trained for a few steps, the last minibatch being a short one; its history."""
    steps = optimizer() if optimizer else keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(steps, loss=networks.crossentropy(), metrics=["accuracy"], **settings)
    return networks.fit(model, *data, epochs=epochs).history


@cache
def plain_mlp(depth, rows):
    """History and weights of the MLP by itself, the same for every pipeline that is compared with it."""
    model = networks.mlp(depth)
    return trained(model, networks.data(rows)), model.get_weights()


def assert_as(history, weights, pm, got):
    """The pipeline's weights, and the history that it ``got``, are these."""
    for name, values in history.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    networks.assert_close(pm.get_weights(), weights)


def compare(make, scheme, devices, data, chunks=None, optimizer=None, epochs=2, jit_compile="auto", **settings):
    """Weights and history after a few steps, the last minibatch being a short one, against plain Keras."""
    single, pm = make(), pipelined(make(), scheme, devices, chunks, **settings)
    history = trained(single, data, optimizer, epochs)
    got = trained(pm, data, optimizer, epochs, jit_compile=jit_compile)
    assert_as(history, single.get_weights(), pm, got)
    return pm
