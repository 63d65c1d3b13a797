"""Calls of a model's methods that are interrupted, and what holds afterwards."""

from __future__ import annotations

import gc
import sys
import threading

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from networks import begin_anew, fit

import pipetrain

X, Y = networks.data(50)  # two minibatches of 20, one of 10


LABELS = np.eye(networks.CLASSES, dtype="float32")[Y]


METHODS = {
    "fit": lambda pm: fit(pm, X, LABELS, validation_data=(X, LABELS)),
    "train_on_batch": lambda pm: pm.train_on_batch(X, LABELS),
    "evaluate": lambda pm: pm.evaluate(X, LABELS, verbose=0),
    "predict": lambda pm: pm.predict(X, verbose=0),
}


def pipeline(scheme, **cut):
    """With metrics of all kinds: named, an object, and one that is built when it sees the first results."""
    metrics = ["accuracy", keras.metrics.CategoricalCrossentropy(from_logits=True), keras.metrics.F1Score()]
    pieces = 2 if scheme in ("gpipe", "1f1b") else None
    pm = pipetrain.PipelineModel(
        networks.mlp(3, 8, name="small"),
        **(cut or networks.parts(scheme, "d0")),
        scheme=scheme,
        microbatches=pieces,
        devices=("CPU:0", "CPU:1"),
    )
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=metrics)
    return pm


def trained(pm, weights):
    begin_anew(pm, weights)
    history = METHODS["fit"](pm).history
    return pm.get_weights(), networks.without_figures(history)


def assert_whole(pm):
    """Nothing is left of what was interrupted, but for the weights that some steps have made."""
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pipetrain")]
    assert gc.isenabled() and sys.getswitchinterval() == pytest.approx(5e-3)
    assert not keras.src.backend.common.stateless_scope.in_stateless_scope() and tf.executing_eagerly()
    assert not any(type(each.value).__name__.startswith("Watched") for each in pm.variables)
    assert all(np.isfinite(weight).all() for weight in pm.get_weights())
    assert pm.turn.thread is None and not pm.turn.methods


def assert_trains_as_undisturbed(pm, weights, want):
    """Bitwise for pipelines; the metrics are those of their own minibatches alone."""
    got, history = trained(pm, weights)
    networks.assert_equal(got, want[1])
    for name, values in history.items():
        np.testing.assert_allclose(values, want[2][name], rtol=1e-5, err_msg=name)
