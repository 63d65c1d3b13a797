"""Calls of a model's methods that are interrupted, and what holds afterwards."""

from __future__ import annotations

import gc
import os
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

PACKAGES = (os.path.dirname(pipetrain.__file__), os.path.join(os.path.dirname(keras.__file__), "src"))


METHODS = {
    "fit": lambda pm: fit(pm, X, LABELS, validation_data=(X, LABELS)),
    "train_on_batch": lambda pm: pm.train_on_batch(X, LABELS),
    "evaluate": lambda pm: pm.evaluate(X, LABELS, verbose=0),
    "predict": lambda pm: pm.predict(X, verbose=0),
}


class Interrupting:
    """Raises KeyboardInterrupt in the main thread as a function of this package or of Keras is called.

    Args:
        at: in the call with this number; None to count them.
    """

    def __init__(self, at=None):
        self.calls, self._at = 0, at

    def __enter__(self):
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _seen(self, frame, event, argument):
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGES):
            return
        # What the first would undo nobody else does; in the others, which may be closing, nobody would hear of it.
        if frame.f_code.co_name in ("__exit__", "__del__", "<genexpr>"):
            return
        self.calls += 1
        if self.calls == self._at:
            raise KeyboardInterrupt


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
    assert keras.src.backend.common.global_state.get_global_attribute("current_call_ctx") is None
    assert (keras.src.backend.common.name_scope.current_path(), tf.get_current_name_scope()) == ("", "")


def assert_trains_as_undisturbed(pm, weights, want):
    """Bitwise for pipelines; the metrics are those of their own minibatches alone."""
    got, history = trained(pm, weights)
    networks.assert_equal(got, want[1])
    for name, values in history.items():
        np.testing.assert_allclose(values, want[2][name], rtol=1e-5, err_msg=name)
