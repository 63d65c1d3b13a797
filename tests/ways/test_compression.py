"""Gradients that are compressed on their way: the same weights in every order, state that lasts, what is refused."""

from __future__ import annotations

import math

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from checkpointed import STEPS
from checkpointed import run as checkpointed
from transfer_models import words

import pipetrain
from pipetrain.schemes.compression import COMPRESSIONS, Compression, TopK

EVERY = tuple(COMPRESSIONS)
DEVICES = ("CPU:0", "CPU:1", "CPU:2")
DATA = networks.data(70)


def trained(scheme="all-reduce", data=DATA, model=None, optimizer=None, **settings):
    """Two epochs, whose last minibatch is short."""
    keras.utils.set_random_seed(0)
    pm = networks.pipeline(
        model or networks.mlp(3, 16), optimizer, scheme=scheme, devices=DEVICES, stages=None, **settings
    )
    networks.fit(pm, *data, epochs=2)
    return pm


@pytest.mark.parametrize("compression", parameters.by_default(EVERY, "int4", "top-k", "power-sgd"))
def test_weights_depend_neither_on_the_order_nor_on_who_sums(compression):
    first, *others = (
        trained(scheme, order=order, compression=compression).get_weights()
        for scheme, order in (("all-reduce", "none"), ("all-reduce", "caramel"), ("parameter-server", "layerwise"))
    )
    for other in others:
        networks.assert_equal(other, first)


@pytest.mark.parametrize("scheme", ("all-reduce", "parameter-server"))
def test_all_elements_are_no_compression(scheme):
    whole = trained(scheme, order="layerwise", compression="top-k:1.0").get_weights()
    networks.assert_equal(whole, trained(scheme, order="layerwise").get_weights())


def test_weights_are_those_of_a_straight_line_of_numpy():
    """A layer without a bias, two devices, the mean squared error, SGD, the largest eighth with error feedback."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 8)).astype("float32"), rng.normal(size=(48, 4)).astype("float32")
    layer = keras.layers.Dense(4, use_bias=False)
    model = keras.Sequential([keras.Input((8,)), layer])
    weights, rate = layer.get_weights()[0].astype(np.float64), 0.1
    pm = pipetrain.PipelineModel(
        model, scheme=pipetrain.AllReduce(order="none", compression=TopK(share=1 / 8)), devices=DEVICES[:2]
    )
    pm.compile(keras.optimizers.SGD(rate), "mse")
    pm.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    left = np.zeros((2, 8, 4))
    for first in [*range(0, 48, 8)] * 2:
        total = np.zeros((8, 4))
        for worker in range(2):
            rows = slice(first + 4 * worker, first + 4 * worker + 4)
            gradient = left[worker] + x[rows].T @ (x[rows] @ weights - y[rows]) * 2 / (8 * 4)
            sent = np.zeros(32)
            places = np.argsort(-np.abs(gradient.ravel()))[:4]
            sent[places] = gradient.ravel()[places]
            left[worker] = gradient - sent.reshape(8, 4)
            total += sent.reshape(8, 4)
        weights -= rate * total
    np.testing.assert_allclose(layer.get_weights()[0], weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "compression", parameters.by_default(("int4", "sign", "top-k", "random-k", "power-sgd"), "sign")
)
@pytest.mark.parametrize("scheme", ("all-reduce", "parameter-server"))
def test_what_was_sent_and_what_is_left_are_all_gradients(scheme, compression):
    """With a rate of 1, weights move by what was sent in one step, or by all gradients without compression."""
    x, y = networks.data(20)
    found = []
    for each in (None, compression):
        model = networks.mlp(2, 16)
        before = model.get_weights()
        pm = networks.pipeline(
            model,
            keras.optimizers.SGD(1.0),
            scheme=scheme,
            devices=DEVICES,
            stages=None,
            order="none",
            compression=each,
        )
        networks.fit(pm, x, y)
        left = {}
        for slot in inside.strategy(pm)._stages.slots():
            if slot.kind.startswith("residual"):
                left[id(slot.weight)] = left.get(id(slot.weight), 0) + keras.ops.convert_to_numpy(slot.variable)
        assert bool(left) == (each is not None)
        after = zip(before, model.get_weights(), model.weights, strict=True)
        found.append([old - new + left.get(id(weight), 0) for old, new, weight in after])
    networks.assert_close(*found)


@pytest.mark.parametrize(
    ("scheme", "compression"),
    parameters.combinations(
        ("all-reduce", "parameter-server"), EVERY, default=[("all-reduce", "int4"), ("parameter-server", "power-sgd")]
    ),
)
def test_a_run_that_is_stopped_goes_on_bitwise(scheme, compression, tmp_path):
    way = {"scheme": scheme, "devices": DEVICES, "order": "layerwise", "compression": compression}
    whole, _ = checkpointed(tmp_path / "whole", **way)
    _, history = checkpointed(tmp_path / "stopped", stop_after=STEPS + 3, **way)
    assert history is None
    again, _ = checkpointed(tmp_path / "stopped", **way)
    networks.assert_equal(again.get_weights(), whole.get_weights())


def test_momentum_is_that_of_each_device_where_few_elements_are_sent():
    """A layer without a bias, two devices, SGD with momentum, which devices sum; what is sent leaves their sums."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 8)).astype("float32"), rng.normal(size=(48, 4)).astype("float32")
    layer = keras.layers.Dense(4, use_bias=False)
    model = keras.Sequential([keras.Input((8,)), layer])
    weights = layer.get_weights()[0].astype(np.float64)
    way = pipetrain.AllReduce(order="none", compression=TopK(share=1 / 8))
    pm = pipetrain.PipelineModel(model, scheme=way, devices=DEVICES[:2])
    pm.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    pm.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    left, velocity = np.zeros((2, 32)), np.zeros((2, 32))
    for first in [*range(0, 48, 8)] * 2:
        total = np.zeros(32)
        for worker in range(2):
            rows = slice(first + 4 * worker, first + 4 * worker + 4)
            gradient = x[rows].T @ (x[rows] @ weights - y[rows]) * 2 / (8 * 4)
            velocity[worker] = 0.9 * velocity[worker] + gradient.ravel()
            left[worker] += velocity[worker]
            places = np.argsort(-np.abs(left[worker]))[:4]
            total[places] += left[worker][places]
            left[worker][places] = velocity[worker][places] = 0.0
        weights -= 0.02 * total.reshape(8, 4)
    np.testing.assert_allclose(layer.get_weights()[0], weights, rtol=1e-4, atol=1e-6)


def test_momentum_that_cannot_be_corrected_is_refused():
    with pytest.raises(ValueError, match="Momentum correction needs"):
        trained(optimizer=keras.optimizers.Adam(), compression=TopK(momentum_correction=True))


def test_rows_of_embeddings_are_sent_as_they_are():
    """With few elements of everything else, whose momentum stays the optimizer's then."""
    rows = np.arange(60 * 6).reshape(60, 6) % 20
    pm = trained("all-reduce", (rows, np.arange(60) % 5), words(), compression=TopK(share=0.1))
    assert not any(slot.kind.startswith("velocity") for slot in inside.strategy(pm)._stages.slots())
    left = {id(slot.weight) for slot in inside.strategy(pm)._stages.slots() if slot.kind.startswith("residual")}
    assert id(pm.model.trainable_variables[0]) not in left and id(pm.model.trainable_variables[1]) in left


@pytest.mark.parametrize("compression", parameters.by_default(EVERY, "float16", "top-k", "int4"))
@pytest.mark.parametrize("spoiled", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_not_hidden(compression, spoiled):
    x, y = networks.data(20)
    pm = networks.pipeline(
        networks.mlp(2, 16), scheme="all-reduce", devices=DEVICES, stages=None, compression=compression
    )
    networks.fit(pm, x, y)
    x[3] = spoiled
    with pytest.raises(FloatingPointError):
        networks.fit(pm, np.concatenate([x, x]), np.concatenate([y, y]))


def test_one_of_ones_own_trains_and_a_device_may_be_given_twice():
    class Rounded(Compression):
        """Sixteenths."""

        def encode(self, values):
            return [tf.cast(tf.round(values * 16), tf.int32)]

        def decode(self, parts):
            return tf.cast(parts[0], tf.float32) / 16

    pm = trained(compression=Rounded())
    assert np.isfinite(pm.evaluate(*DATA, verbose=0)[0])
    with_feedback = {"order": "none", "compression": "int4", "stages": None}
    for scheme in ("all-reduce", "parameter-server"):
        keras.utils.set_random_seed(0)
        pm = networks.pipeline(networks.mlp(3, 16), scheme=scheme, devices=("CPU:0", "CPU:0"), **with_feedback)
        networks.fit(pm, *DATA)
        kinds = {slot.kind for slot in inside.strategy(pm)._stages.slots() if slot.kind.startswith("residual")}
        assert kinds == {"residual_of_worker_0", "residual_of_worker_1"}
        for n in range(2):
            left = [s.variable for s in inside.strategy(pm)._stages.slots() if s.kind == f"residual_of_worker_{n}"]
            assert any(keras.ops.convert_to_numpy(each).any() for each in left)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_types_of_numbers(dtype):
    for compression in ("top-k:0.2", "int8"):
        layers = [keras.layers.Dense(8, "tanh", dtype=dtype), keras.layers.Dense(networks.CLASSES, dtype=dtype)]
        model = keras.Sequential([keras.Input((networks.FEATURES,), dtype=dtype), *layers])
        pm = networks.pipeline(model, scheme="all-reduce", devices=DEVICES, stages=None, compression=compression)
        networks.fit(pm, DATA[0].astype("float32"), DATA[1])
        like = inside.strategy(pm)._compressor._codecs
        planned = inside.strategy(pm)._gradient_bytes()
        for n, codec in like.items():
            assert planned[n] == sum(each.dtype.size * each.shape.num_elements() for each in codec.parts)


def test_only_data_parallelism_by_messages_compresses():
    with pytest.raises(ValueError, match="compress gradients"):
        networks.in_way(networks.small(), 2, "1f1b", compression="int8")
    with pytest.raises(ValueError, match="Unknown compression"):
        pipetrain.AllReduce(compression="int9")
    with pytest.raises(ValueError, match="chosen, too"):
        networks.in_way(networks.small(), scheme="auto", compression="int8")
