"""Calls of one model from several threads: they wait for their turn, or are refused while another thread trains."""

from __future__ import annotations

import threading

import keras
import networks
import numpy as np
import parameters
import pytest

import pipetrain

X, Y = networks.data(60)
SCHEMES = ["1f1b", "spectrain", "all-reduce", "data-parallel", "coded-reduce"]
METHODS = {
    "fit": lambda pm, path: networks.fit(pm, X, Y),
    "train_on_batch": lambda pm, path: pm.train_on_batch(X, Y),
    "evaluate": lambda pm, path: pm.evaluate(X, Y, verbose=0),
    "predict": lambda pm, path: pm.predict(X, verbose=0),
    "predict_on_batch": lambda pm, path: pm.predict_on_batch(X),
    "get_weights": lambda pm, path: pm.get_weights(),
    "set_weights": lambda pm, path: pm.set_weights([]),
    "save": lambda pm, path: pm.save(path / "model.keras"),
    "save_weights": lambda pm, path: pm.save_weights(path / "model.weights.h5"),
    "compile": lambda pm, path: pm.compile("sgd", "mse"),
    "partition": lambda pm, path: pm.partition(20),
}


def in_a_thread(call):
    """What the call gives in another thread, or raises."""
    given = []

    def run():
        try:
            given.append(call())
        except Exception as error:
            given.append(error)

    thread = threading.Thread(target=run, name="other", daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    return given[0]


def trained(pm, weights, callbacks=()):
    networks.begin_anew(pm, weights)
    networks.fit(pm, X, Y, callbacks=list(callbacks))
    return pm.get_weights()


@pytest.mark.parametrize("scheme", parameters.by_default(SCHEMES, "spectrain", wide=("all-reduce",)))
def test_while_one_thread_trains_calls_from_others_are_refused(scheme, tmp_path):
    """A callback that waits for the other thread does not wait for ever, and training is not disturbed."""
    pm = networks.compiled(scheme) if scheme != "coded-reduce" else coded()
    weights = pm.get_weights()
    undisturbed, found = trained(pm, weights), {}

    def call_all(batch, logs):
        if batch == 1:
            for name, call in METHODS.items():
                found[name] = in_a_thread(lambda call=call: call(pm, tmp_path))

    disturbed = trained(pm, weights, [keras.callbacks.LambdaCallback(on_train_batch_end=call_all)])
    for name, error in found.items():
        assert isinstance(error, RuntimeError), name
        text = str(error)
        assert f"Received: {name} in thread 'other', during fit" in text and "Try" in text, name
    assert len(found) == len(METHODS)
    networks.assert_equal(disturbed, undisturbed)


def coded():
    model = networks.small()
    pm = pipetrain.PipelineModel(model, scheme=pipetrain.CodedReduce(children=2), devices=("CPU:0", "CPU:1"))
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
    return pm


@pytest.mark.parametrize("scheme", parameters.by_default(["1f1b", "spectrain", "all-reduce"], "spectrain"))
def test_variables_used_in_another_thread_while_one_trains(scheme):
    """Refused, where plain Keras reads: what is there is old."""
    pm, found = networks.compiled(scheme), []
    variable = pm.model.layers[0].kernel

    def use(batch, logs):
        if batch == 1:
            found.extend(in_a_thread(call) for call in (variable.numpy, lambda: pm.model(X[:2])))

    networks.fit(pm, X, Y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=use)])
    assert [type(each) for each in found] == [RuntimeError, RuntimeError]
    assert f"Received: a use of variable {variable.path!r}, in thread 'other'" in str(found[0])
    np.testing.assert_array_equal(in_a_thread(variable.numpy), variable.numpy())


@pytest.mark.parametrize("scheme", parameters.by_default(["1f1b", "all-reduce", "data-parallel"], "1f1b"))
def test_without_training_calls_of_several_threads_take_turns(scheme):
    pm = networks.compiled(scheme)
    want = pm.predict(X, verbose=0)
    losses = [pm.evaluate(X, Y, verbose=0)]
    given: list[list] = [[] for _ in range(3)]

    def calls(n):
        for _ in range(3):
            given[n].append(pm.predict(X, verbose=0) if n else pm.evaluate(X, Y, verbose=0))

    threads = [threading.Thread(target=calls, args=(n,), daemon=True) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [len(each) for each in given] == [3, 3, 3]
    np.testing.assert_allclose(given[0], losses * 3, rtol=1e-6)
    for outputs in given[1] + given[2]:
        np.testing.assert_array_equal(outputs, want)


def test_a_thread_that_has_ended_holds_nobody_up():
    pm = networks.compiled("1f1b")
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    pm.turn.thread, pm.turn.methods = thread, ["fit"]  # as an interrupt may have left them
    assert np.isfinite(pm.predict(X, verbose=0)).all()


def test_a_fit_that_was_interrupted_while_it_ended_holds_nobody_up():
    pm = networks.compiled("1f1b")
    pm.session = pm._watch = pm.data_reader = object()  # as an interrupt may have left them
    assert np.isfinite(pm.predict(X, verbose=0)).all()
    pm.session = pm._watch = object()
    networks.fit(pm, X, Y)
    assert pm.session is None


def test_a_layer_whose_call_was_interrupted_is_not_called_any_more(monkeypatch):
    pm, made = networks.compiled("1f1b"), keras.layers.Layer._get_call_context

    def interrupted(self):
        made(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(keras.layers.Layer, "_get_call_context", interrupted)
        patch.setattr(type(pm), "_settle", lambda self, *given: self.model.layers[0](np.zeros((1, networks.FEATURES))))
        networks.fit(pm, X, Y)
    assert keras.src.backend.common.global_state.get_global_attribute("current_call_ctx") is None


def test_training_in_a_thread_of_its_own():
    """Callbacks run in it, and there the model's variables may be used."""
    pm, seen = networks.compiled("1f1b"), []
    kernel = pm.model.layers[0].kernel
    read = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(kernel.numpy()))
    error = in_a_thread(lambda: networks.fit(pm, X, Y, callbacks=[read]))
    assert isinstance(error, keras.callbacks.History)
    assert len(seen) == 3 and not np.array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[-1], kernel.numpy())
