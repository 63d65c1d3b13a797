"""Stages that XLA compiles: the same training, and TensorFlow's kernels for what XLA cannot compile."""

from __future__ import annotations

import warnings

import keras
import networks
import numpy as np
import pytest
import reference
from test_semantics import ASYNCHRONOUS, LATER, compare, constantly

from pipetrain.compute.functions import kernels

L = keras.layers


@pytest.fixture
def ops(monkeypatch):
    """What XLA was asked to compile, and whether it could."""
    made, op = [], kernels.Kernels.op

    def noted(self, function, *specs):
        call = op(self, function, *specs)
        if self.compiled:
            made.append(function)
        return call

    monkeypatch.setattr(kernels.Kernels, "op", noted)
    return made


@pytest.mark.parametrize("scheme", [*ASYNCHRONOUS, *LATER])
def test_asynchronous_schemes_equal_the_reference(scheme, ops, recwarn):
    settings = reference.Settings(scheme, constantly(0.05))
    compare(settings, 3, keras.optimizers.SGD(0.05, momentum=0.9), jit_compile=True)
    assert ops
    assert not [each for each in recwarn if "XLA" in str(each.message)]


def layered(*layers, shape, dtype="float32"):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers, L.Dense(5)])


MODELS = {
    "dropout and BatchNormalization": lambda: layered(
        L.Dense(8, "relu"), L.BatchNormalization(), L.Dropout(0.3, seed=1), L.Dense(8, "relu"), shape=(6,)
    ),
    "convolutions": lambda: layered(
        L.Conv2D(4, 3, padding="same"), L.BatchNormalization(), L.MaxPooling2D(), L.Flatten(), shape=(6, 6, 2)
    ),
    "an embedding": lambda: layered(
        L.Embedding(20, 8), L.LayerNormalization(), L.Flatten(), L.Dense(8), shape=(7,), dtype="int32"
    ),
    "masks and recurrence": lambda: layered(
        L.Embedding(20, 8, mask_zero=True), L.Dense(8), L.LSTM(6), L.Dense(8), shape=(7,), dtype="int32"
    ),
}


def made(name):
    keras.utils.set_random_seed(0)
    return MODELS[name]()


def inputs(model):
    rng = np.random.default_rng(0)
    tensor = model.inputs[0]
    shape = (44, *tensor.shape[1:])
    numbers = rng.integers(0, 20, shape) if tensor.dtype == "int32" else rng.normal(size=shape)
    return numbers.astype(tensor.dtype), rng.integers(0, 5, 44)


@pytest.mark.parametrize("optimizer", networks.by_default(["sgd", "adam"], "sgd"))
@pytest.mark.parametrize("name", MODELS)
def test_layers_train_as_in_keras_with_xla(name, optimizer):
    """The last batch is short; what XLA cannot compile, which is recurrence cut in two, runs without it."""
    trained = []
    for pipelined in (False, True):
        model = made(name)
        optimizers = {"sgd": keras.optimizers.SGD(0.05, momentum=0.9), "adam": keras.optimizers.Adam(1e-2)}
        cut = model.layers[len(model.layers) // 2 - 1].name
        if pipelined:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                settings = {"scheme": "gpipe", "cuts": [cut], "microbatches": 1, "jit_compile": True}
                pm = networks.pipeline(model, optimizers[optimizer], **settings)
                history = networks.fit(pm, *inputs(model), epochs=2, validation_data=inputs(model)).history
        else:
            model.compile(optimizers[optimizer], networks.crossentropy(), metrics=["accuracy"], jit_compile=True)
            history = networks.fit(model, *inputs(model), epochs=2, validation_data=inputs(model)).history
        trained.append((model.get_weights(), history))
    (ours, our_history), (theirs, their_history) = trained[::-1]
    networks.assert_close(ours, theirs, 2e-5)
    for key, values in their_history.items():
        np.testing.assert_allclose(our_history[key], values, rtol=1e-4, err_msg=key)


def test_bfloat16_is_compiled():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        losses = []
        for compiled in (False, True):
            pm = networks.pipeline(networks.mlp(), scheme="1f1b", microbatches=2, jit_compile=compiled)
            losses.append(networks.fit(pm, *networks.data(200), epochs=3).history["loss"])
        np.testing.assert_allclose(*losses, rtol=0.02)
        assert losses[1][-1] < losses[1][0]
    finally:
        keras.config.set_dtype_policy(policy)


def test_what_xla_cannot_compile_is_named_once_and_trains():
    model = made("masks and recurrence")
    pm = networks.pipeline(model, scheme="gpipe", cuts=[model.layers[0].name], microbatches=2, jit_compile=True)
    with pytest.warns(UserWarning) as noted:
        networks.fit(pm, *inputs(model))
    (line,) = {str(each.message) for each in noted if "XLA" in str(each.message)}
    assert line.startswith(f"XLA cannot compile {model.layers[1].name} to {model.layers[-1].name}, which runs without")


@pytest.mark.parametrize("jit_compile", [False, "auto"])
def test_nothing_is_compiled_unless_it_is_asked_for(jit_compile, ops):
    pm = networks.pipeline(networks.mlp(), scheme="spectrain", jit_compile=jit_compile)
    networks.fit(pm, *networks.data(60), validation_data=networks.data(60))
    assert not ops


def test_the_same_seed_gives_bitwise_the_same_weights():
    weights = []
    for _ in range(2):
        pm = networks.pipeline(networks.mlp(), scheme="spectrain", jit_compile=True)
        networks.fit(pm, *networks.data(110))
        weights.append(pm.get_weights())
    networks.assert_equal(*weights)
