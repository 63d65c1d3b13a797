"""Gradients, and what crosses cuts, compressed on their way: which weights come of it, what lasts, what is refused."""

from __future__ import annotations

import contextlib
import math
import re

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import reference
import tensorflow as tf
from checkpointed import Stop, arrays, assert_goes_on_bitwise, model, pipeline, run
from transfer_models import words
from transfer_plans import late_plan

import pipetrain
from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.compute.functions.split import size_bytes
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.transfers.compression import OF_REPLICAS, TENSORS, CutMessages, uniform
from pipetrain.schemes.compression import COMPRESSIONS, CUTS, Compression, Int8, TopK, compression_of
from pipetrain.schemes.splitting import microbatch_rows, rows_of

EVERY = tuple(COMPRESSIONS)
DEVICES = ("CPU:0", "CPU:1", "CPU:2")
DATA = networks.data(70)


EIGHTH = TopK(share=1 / 8)
AS_WORKERS = {"scheme": pipetrain.AllReduce(order="none", compression=EIGHTH)}
AS_REPLICAS = {
    "scheme": pipetrain.OneFOneB(replica_compression=EIGHTH),
    "stages": 1,
    "replicas": (2,),
    "microbatches": 1,
}


def trained(scheme="all-reduce", data=DATA, model=None, optimizer=None, **settings):
    """Two epochs, whose last minibatch is short."""
    keras.utils.set_random_seed(0)
    pm = networks.pipeline(
        model or networks.mlp(3, 16), optimizer, scheme=scheme, devices=DEVICES, stages=None, **settings
    )
    networks.fit(pm, *data, epochs=2)
    return pm


@pytest.mark.parametrize("compression", parameters.by_default(EVERY, wide=("int4", "top-k", "power-sgd")))
def test_weights_depend_neither_on_the_order_nor_on_who_sums(compression):
    first, *others = (
        trained(scheme, order=order, compression=compression).get_weights()
        for scheme, order in (("all-reduce", "none"), ("all-reduce", "caramel"), ("parameter-server", "layerwise"))
    )
    for other in others:
        networks.assert_equal(other, first)


@pytest.mark.parametrize("scheme", ["all-reduce", pytest.param("parameter-server", marks=pytest.mark.wide)])
def test_all_elements_are_no_compression(scheme):
    whole = trained(scheme, order="layerwise", compression="top-k:1.0").get_weights()
    networks.assert_equal(whole, trained(scheme, order="layerwise").get_weights())


@pytest.mark.parametrize("way", [AS_WORKERS, AS_REPLICAS])
def test_weights_are_those_of_a_straight_line_of_numpy(way):
    """A layer without a bias, two devices, the mean squared error, SGD, the largest eighth with error feedback."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 8)).astype("float32"), rng.normal(size=(48, 4)).astype("float32")
    layer = keras.layers.Dense(4, use_bias=False)
    model = keras.Sequential([keras.Input((8,)), layer])
    weights, rate = layer.get_weights()[0].astype(np.float64), 0.1
    pm = pipetrain.PipelineModel(model, devices=DEVICES[:2], **way)
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
        ("all-reduce", "parameter-server"),
        EVERY,
        default=[("parameter-server", "power-sgd")],
        wide=[("all-reduce", "int4")],
    ),
)
def test_a_run_that_is_stopped_goes_on_bitwise(scheme, compression, tmp_path):
    way = {"scheme": scheme, "devices": DEVICES, "order": "layerwise", "compression": compression}
    assert_goes_on_bitwise(tmp_path, **way)


@pytest.mark.parametrize("count", [48, 49])
@pytest.mark.parametrize(("way", "threads"), [(AS_WORKERS, False), (AS_REPLICAS, False), (AS_REPLICAS, True)])
def test_momentum_is_that_of_each_device_where_few_elements_are_sent(way, threads, count, monkeypatch):
    """A layer without a bias, two devices, SGD with momentum, which devices sum; what is sent leaves their sums.

    Of 49 rows one minibatch has one: the first device has a gradient of zeros.
    """
    if threads:
        inside.by_threads(monkeypatch)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(count, 8)).astype("float32"), rng.normal(size=(count, 4)).astype("float32")
    layer = keras.layers.Dense(4, use_bias=False)
    model = keras.Sequential([keras.Input((8,)), layer])
    weights = layer.get_weights()[0].astype(np.float64)
    pm = pipetrain.PipelineModel(model, devices=DEVICES[:2], **way)
    pm.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    pm.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    left, velocity = np.zeros((2, 32)), np.zeros((2, 32))
    for first in [*range(0, count, 8)] * 2:
        total, size = np.zeros(32), min(8, count - first)
        for worker in range(2):
            rows = slice(first + size * worker // 2, first + size * (worker + 1) // 2)
            gradient = x[rows].T @ (x[rows] @ weights - y[rows]) * 2 / (size * 4)
            velocity[worker] = 0.9 * velocity[worker] + gradient.ravel()
            left[worker] += velocity[worker]
            places = np.argsort(-np.abs(left[worker]))[:4]
            total[places] += left[worker][places]
            left[worker][places] = velocity[worker][places] = 0.0
        weights -= 0.02 * total.reshape(8, 4)
    np.testing.assert_allclose(layer.get_weights()[0], weights, rtol=1e-4, atol=1e-6)


# A majority of signs

VOTED = "sign:majority"
PULLED = {"scheme": pipetrain.ParameterServer(order="layerwise", compression=VOTED), "devices": DEVICES}
VOTES = {
    "all-reduce": {"scheme": pipetrain.AllReduce(order="none", compression=VOTED), "devices": DEVICES},
    "two workers": {"scheme": pipetrain.AllReduce(order="none", compression=VOTED), "devices": DEVICES[:2]},
    "one worker": {"scheme": pipetrain.AllReduce(order="none", compression=VOTED), "devices": DEVICES[:1]},
    "parameter-server": PULLED,
    "stale": {**PULLED, "scheme": pipetrain.ParameterServer(order="none", compression=VOTED, synchrony="stale:1")},
    "replicas": {
        "scheme": pipetrain.OneFOneB(replica_compression=VOTED),
        "stages": 1,
        "replicas": (3,),
        "microbatches": 1,
        "devices": DEVICES,
    },
}


@pytest.mark.parametrize(("way", "threads"), [*((each, False) for each in VOTES), ("replicas", True)])
def test_the_majority_of_signs_is_that_of_numpy(way, threads, monkeypatch):
    """One layer without a bias; one input is 0 in all rows, one in the first half of a minibatch.

    The last minibatch has two rows: one of three workers has none, and does not vote.
    """
    if threads:
        inside.by_threads(monkeypatch)
    rng = np.random.default_rng(0)
    networks.draw_from(0)
    x, y = rng.normal(size=(56, 8)).astype("float32"), rng.normal(size=(56, 4)).astype("float32")
    x[:, 3] = 0.0
    for first in range(0, 56, 9):
        x[first : first + 4, 5] = 0.0
    layer = keras.layers.Dense(4, use_bias=False)
    model = keras.Sequential([keras.Input((8,)), layer])
    weights, rate = layer.get_weights()[0].astype(np.float64), 0.01
    begun = weights.copy()
    pm = pipetrain.PipelineModel(model, **VOTES[way])
    pm.compile(keras.optimizers.SGD(rate), "mse")
    pm.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0)
    workers, late, silent = len(VOTES[way]["devices"]), None, 0
    for step, first in enumerate([*range(0, 56, 9)] * 2):
        if way == "stale" and first == 0:
            late = None  # an epoch's last gradients are applied when it ends
        batch, votes = np.arange(first, min(first + 9, 56)), np.zeros((8, 4))
        for worker in range(workers):
            mine = batch[rows_of(len(batch), worker, workers)]
            gradient = x[mine].T @ (x[mine] @ (weights if late is None else late) - y[mine])
            silent += not len(mine)
            of_zero = 1 if (step + worker) % 2 == 0 else -1
            votes += np.where(gradient == 0, of_zero, np.sign(gradient)) if len(mine) else 0
        if way == "stale":
            late = weights if first + 9 < 56 else None
        weights = weights - rate * np.sign(votes)
    assert silent == (2 if workers == 3 else 0)
    np.testing.assert_allclose(layer.get_weights()[0], weights, atol=2e-6)
    moved = np.abs(layer.get_weights()[0] - begun)
    assert moved.max() > 2 * rate and moved[3].max() < 1.01 * rate


@pytest.mark.parametrize(
    "way",
    [
        {"scheme": "all-reduce", "devices": DEVICES, "order": "layerwise", "compression": VOTED},
        {"scheme": "1f1b", "replica_compression": VOTED, "replicas": (2, 2), "stages": 2, "microbatches": 2},
    ],
    ids=["all-reduce", "1f1b"],
)
def test_a_run_by_majority_that_is_stopped_goes_on_bitwise(way, tmp_path):
    assert_goes_on_bitwise(tmp_path, **way)


def test_where_there_is_no_majority_is_refused():
    def compiled(optimizer=None, model=None, **way):
        pm = networks.pipeline(model or networks.mlp(2, 16), optimizer or keras.optimizers.SGD(0.001), **way)
        pm.fit(np.zeros((8, 2)), np.ones((8, 1)), batch_size=8, verbose=0)

    every = {"scheme": "all-reduce", "devices": DEVICES, "stages": None, "order": "none", "compression": VOTED}
    with pytest.raises(ValueError, match=r"average how far.*='sign:majority', synchrony='local:4'. Try .*='sign'"):
        pipetrain.AllReduce(compression=VOTED, synchrony="local:4")
    scaled = keras.optimizers.SGD(0.001, loss_scale_factor=1024.0)
    with pytest.raises(ValueError, match=r"loss_scale_factor=1024.0. Try loss_scale_factor=None"):
        compiled(scaled, **every)
    with pytest.raises(ValueError, match=r"compression='sign:majority', embeddings \[.*\]. Try 'sign'"):
        compiled(model=words(), **every)
    table = keras.Sequential([keras.Input((2,)), Table(name="table"), keras.layers.Dense(1)])
    pm = pipetrain.PipelineModel(table, scheme=pipetrain.AllReduce(compression=VOTED), devices=DEVICES[:2])
    pm.compile(keras.optimizers.SGD(1e-3), "mse")
    with pytest.raises(ValueError, match=r"rows for \[.*table/rows'\]. Try 'sign'"):
        pm.fit(np.zeros((8, 2)), np.ones((8, 1)), batch_size=8, verbose=0)
    with pytest.raises(ValueError, match=r"replicas=\(2, 1, 2\). Try replicas=\(2, 2, 2\), or 'sign'"):
        networks.pipeline(scheme="1f1b", replica_compression=VOTED, replicas=(2, 1, 2))
    shared = networks.in_way(
        networks.tied_autoencoder(),
        scheme="1f1b",
        replica_compression=VOTED,
        replicas=(2, 2, 2),
        cuts=("d0", "d3"),
    )
    with pytest.raises(ValueError, match=r"weights that several layers or calls have. Try 'sign'"):
        shared.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)


CLIPNORM = 1.5
WARM = {"share": 1 / 8, "warm_up": 10, "local_clipnorm": CLIPNORM}


@pytest.mark.parametrize("scheme", [pipetrain.AllReduce, pipetrain.ParameterServer])
def test_warm_up_and_clipping_are_those_of_numpy(scheme):
    """Two layers without biases, two devices: momentum, fewer elements quarter by quarter, and one norm of both."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 8)).astype("float32"), rng.normal(size=(48, 4)).astype("float32")
    layers = [keras.layers.Dense(6, use_bias=False), keras.layers.Dense(4, use_bias=False)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    first, second = (each.get_weights()[0].astype(np.float64) for each in layers)
    pm = pipetrain.PipelineModel(model, devices=DEVICES[:2], scheme=scheme(order="none", compression=TopK(**WARM)))
    pm.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    pm.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    left, velocity = ([[np.zeros(48), np.zeros(24)] for _ in range(2)] for _ in range(2))
    clipped = 0
    for update, begin in enumerate([*range(0, 48, 8)] * 2):
        share = max(1 / 8, 0.25 * 0.5 ** (min(4, 4 * update // 10) / 4))
        totals = [np.zeros(48), np.zeros(24)]
        for worker in range(2):
            rows = slice(begin + 4 * worker, begin + 4 * worker + 4)
            hidden = x[rows] @ first
            error = (hidden @ second - y[rows]) * 2 / (8 * 4)
            gradients = [(x[rows].T @ (error @ second.T)).ravel(), (hidden.T @ error).ravel()]
            norm = math.sqrt(sum(float(each @ each) for each in gradients))
            factor = min(1.0, CLIPNORM / math.sqrt(2) / norm)
            clipped += factor < 1
            for n, gradient in enumerate(gradients):
                velocity[worker][n] = 0.9 * velocity[worker][n] + factor * gradient
                left[worker][n] += velocity[worker][n]
                places = np.argsort(-np.abs(left[worker][n]))[: math.ceil(share * gradient.size)]
                totals[n][places] += left[worker][n][places]
                left[worker][n][places] = velocity[worker][n][places] = 0.0
        first, second = first - 0.02 * totals[0].reshape(8, 6), second - 0.02 * totals[1].reshape(6, 4)
    assert 0 < clipped < 24
    for layer, expected in zip(layers, (first, second), strict=True):
        np.testing.assert_allclose(layer.get_weights()[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.wide
def test_a_run_that_is_stopped_in_its_warm_up_goes_on_bitwise(tmp_path):
    """Gradients that are late at the end of a quarter are sent as those of their own step."""
    way = {
        "scheme": "all-reduce",
        "devices": DEVICES,
        "order": late_plan(model()),
        "compression": TopK(0.1, warm_up=40),
    }
    whole = assert_goes_on_bitwise(tmp_path, **way)
    assert inside.plan(whole).late.packs


@pytest.mark.wide
def test_weights_after_a_warm_up_depend_neither_on_the_order_nor_on_who_sums():
    compression = TopK(share=0.05, warm_up=8)
    first, *others = (
        trained(scheme, order=order, compression=compression).get_weights()
        for scheme, order in (("all-reduce", "none"), ("all-reduce", "caramel"), ("parameter-server", "push-pull"))
    )
    for other in others:
        networks.assert_equal(other, first)


@pytest.mark.parametrize("factor", [None, 1024.0])
def test_clipping_knows_that_the_loss_is_scaled(factor):
    model = networks.mlp(2, 16)
    before = model.get_weights()
    compression = TopK(1.0, local_clipnorm=0.01)
    optimizer = keras.optimizers.SGD(1.0, loss_scale_factor=factor)
    way = {"scheme": "all-reduce", "devices": DEVICES[:1], "stages": None, "order": "none"}
    networks.fit(networks.pipeline(model, optimizer, compression=compression, **way), *networks.data(20))
    moved = [old - new for old, new in zip(before, model.get_weights(), strict=True)]
    assert math.sqrt(sum(float(np.sum(each**2)) for each in moved)) == pytest.approx(0.01, rel=1e-4)


def test_gradients_that_are_not_sent_are_not_clipped():
    with pytest.raises(ValueError, match="workers that join their weights send none"):
        trained(synchrony="local:4", compression=TopK(local_clipnorm=1.0))


def test_momentum_that_cannot_be_corrected_is_refused():
    with pytest.raises(ValueError, match="Momentum correction needs"):
        trained(optimizer=keras.optimizers.Adam(), compression=TopK(momentum_correction=True))


class Table(keras.layers.Layer):
    """Its gradient is rows, though it is no Embedding."""

    def build(self, shape):
        """One weight."""
        self.rows = self.add_weight(shape=(5, 3), name="rows")

    def call(self, x):
        """The rows by their numbers."""
        return tf.gather(self.rows, tf.cast(x[:, 0], tf.int32))


@pytest.mark.parametrize(
    "way",
    [
        {"scheme": pipetrain.AllReduce(compression=TopK(0.4)), "devices": DEVICES[:2]},
        {
            "scheme": pipetrain.OneFOneB(replica_compression=TopK(0.4)),
            "devices": DEVICES[:3],
            "cuts": ["table"],
            "replicas": (2, 1),
            "microbatches": 1,
        },
    ],
    ids=["all-reduce", "1f1b"],
)
def test_rows_of_other_layers_have_no_momentum_to_correct(way):
    """They are not compressed: the momentum, which is taken from the optimizer, would be nowhere."""
    model = keras.Sequential([keras.Input((2,)), Table(name="table"), keras.layers.Dense(1)])
    pm = pipetrain.PipelineModel(model, **way)
    pm.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse")
    with pytest.raises(ValueError, match=r"rows for \[.*table/rows'\]. Try momentum_correction=False"):
        pm.fit(np.zeros((8, 2)), np.ones((8, 1)), batch_size=8, verbose=0)


def test_rows_of_embeddings_are_sent_as_they_are():
    """With few elements of everything else, whose momentum stays the optimizer's then."""
    rows = np.arange(60 * 6).reshape(60, 6) % 20
    pm = trained("all-reduce", (rows, np.arange(60) % 5), words(), compression=TopK(share=0.1))
    assert not any(slot.kind.startswith("velocity") for slot in inside.strategy(pm)._stages.slots())
    left = {id(slot.weight) for slot in inside.strategy(pm)._stages.slots() if slot.kind.startswith("residual")}
    assert id(pm.model.trainable_variables[0]) not in left and id(pm.model.trainable_variables[1]) in left


@pytest.mark.parametrize(
    "compression", parameters.by_default((*EVERY, "sign:majority"), "float16", "top-k", "int4", "sign:majority")
)
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


@pytest.mark.wide
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


@pytest.mark.wide
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


def test_what_compresses_nothing_is_refused():
    for scheme in ("single", "data-parallel", "grid"):
        with pytest.raises(ValueError, match="compress what they send"):
            networks.in_way(networks.small(), scheme=scheme, compression="int8")
    with pytest.raises(ValueError, match="Unknown compression"):
        pipetrain.AllReduce(compression="int9")
    with pytest.raises(ValueError, match="chosen, too"):
        networks.in_way(networks.small(), scheme="auto", compression="int8")


# What crosses a pipeline's cuts

CROSSING = tuple(each.name for each in CUTS)
DEPTH, WIDTH, ROWS, BATCH, RATE = 6, 16, 50, 8, 0.05
PIPELINES = {  # each with the rule of the reference, its stages, and its other options
    "1f1b": (reference.Settings("synchronous", lambda t: RATE, microbatches=3), 3, {"microbatches": 3}),
    "gpipe": (reference.Settings("synchronous", lambda t: RATE, microbatches=2), 2, {"microbatches": 2}),
    "zb-h1": (reference.Settings("synchronous", lambda t: RATE, microbatches=4), 3, {"microbatches": 4}),
    "zb-v": (reference.Settings("synchronous", lambda t: RATE, microbatches=4), 4, {"microbatches": 4}),
    "interleaved": (reference.Settings("synchronous", lambda t: RATE, microbatches=2), 4, {"microbatches": 2}),
    "vanilla": (reference.Settings("vanilla", lambda t: RATE), 3, {}),
    "weight-stashing": (reference.Settings("weight-stashing", lambda t: RATE), 2, {}),
    "spectrain": (reference.Settings("spectrain", lambda t: RATE), 4, {}),
    "2bw": (reference.Settings("2bw", lambda t: RATE, microbatches=3), 3, {"microbatches": 3}),
}


def crossed(name):
    """What arrives of a tensor that crosses a cut, by NumPy; random numbers are those of the package."""
    options = compression_of(name)

    def crosses(values, way, cut, minibatch, microbatch):
        sent = values.astype(np.float32)
        if options is None or isinstance(options, Int8):
            return values if options is None else integers(sent, way, cut, minibatch, microbatch)
        return tf.cast(tf.cast(sent, options.name), tf.float64).numpy()

    def integers(sent, way, cut, minibatch, microbatch):
        seed = tf.constant(minibatch, tf.int64), (2 * cut + (way == "B")) * TENSORS
        random, flat = uniform(seed, microbatch + 1, [sent.size]).numpy(), sent.ravel()
        made = np.zeros(sent.size)
        for first in range(0, sent.size, options.block):
            part = slice(first, first + options.block)
            step = np.abs(flat[part]).max() / np.float32(options.levels)
            made[part] = np.floor(flat[part] / step + random[part]) * step if step else 0.0
        return made.reshape(sent.shape)

    return crosses


def by_the_reference(scheme, name):
    settings, stages, _ = PIPELINES[scheme]
    x, y = networks.data(ROWS)
    state = reference.State([tuple(layer.get_weights()) for layer in networks.mlp(DEPTH, WIDTH).layers])
    batches = [(x[n : n + BATCH], y[n : n + BATCH]) for n in range(0, ROWS, BATCH)]
    for _ in range(2):
        reference.train(settings, state, networks.ends(DEPTH, stages), batches, crossed(name))
    return [array for layer in state.layers for array in layer]


def piped(scheme, name, **settings):
    _, stages, own = PIPELINES[scheme]
    on = {"devices": DEVICES[:2]} if scheme in ("interleaved", "zb-v") else {}
    given = {"cuts": networks.cuts(DEPTH, stages), **own, **on, **settings}
    pm = networks.pipeline(networks.mlp(DEPTH, WIDTH), scheme=scheme, compression=name, **given)
    networks.fit(pm, *networks.data(ROWS), batch_size=BATCH, epochs=2)
    return pm


def furthest(first, second):
    return max(np.abs(a - b).max() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("scheme", "name"),
    parameters.combinations(
        [*PIPELINES],
        (*CROSSING, "int8:5"),
        default=[("1f1b", "int8")],
        wide=[("zb-v", "int4"), ("spectrain", "int8:5"), ("2bw", "bfloat16")],
    ),
)
def test_weights_with_compressed_cuts_are_those_of_the_reference(scheme, name):
    """Nearer by far than to what comes of no compression: a random number may be as near to a step as rounding is."""
    weights, expected = piped(scheme, name).get_weights(), by_the_reference(scheme, name)
    apart = furthest(expected, by_the_reference(scheme, None))
    assert furthest(weights, expected) < 0.3 * apart and apart > 1e-5


@pytest.mark.parametrize("scheme", parameters.by_default(("1f1b", "spectrain"), wide=("1f1b", "spectrain")))
def test_threads_send_what_functions_do_and_no_compression_is_none(scheme, monkeypatch):
    plain = piped(scheme, None).get_weights()
    networks.assert_equal(piped(scheme, "none").get_weights(), plain)
    in_functions = piped(scheme, "int8").get_weights()
    inside.by_threads(monkeypatch)
    by_threads = piped(scheme, "int8")
    assert not inside.is_program(by_threads)
    assert furthest(by_threads.get_weights(), in_functions) < 0.1 * furthest(in_functions, plain)


@pytest.mark.parametrize(
    ("scheme", "name"),
    parameters.combinations(
        ("1f1b", "spectrain", "vanilla", "zb-h1"), CROSSING, default=[], wide=[("spectrain", "int8")]
    ),
)
def test_a_pipeline_that_is_stopped_goes_on_bitwise(scheme, name, tmp_path):
    way = {"scheme": scheme, "compression": name}
    assert_goes_on_bitwise(tmp_path, **way)


@pytest.mark.wide
def test_replicas_send_each_other_messages_of_their_rows():
    for scheme in ("1f1b", "spectrain"):
        pieces = {"microbatches": 2} if scheme == "1f1b" else {}
        found = [
            networks.pipeline(scheme=scheme, compression=name, replicas=(2, 1, 2), **pieces)
            for name in ("int8", "int8", None)
        ]
        for pm in found:
            networks.fit(pm, *networks.data(ROWS), epochs=2)
        first, second, plain = (pm.get_weights() for pm in found)
        networks.assert_equal(first, second)
        assert 0 < furthest(first, plain) < 0.05


@pytest.mark.wide
def test_tokens_and_masks_cross_as_they_are():
    """Tokens that cross a cut with activations, an embedding's mask, and a model with open lengths."""
    draw = np.random.default_rng(0)
    tokens, x = draw.integers(1, 20, (60, 6)), draw.normal(size=(60, 6, 4)).astype("float32")
    given, beside = keras.Input((None, 4)), keras.Input((None,), dtype="int32")
    first = keras.layers.Dense(4, "tanh", name="first")(given)
    words = keras.layers.Embedding(20, 4, mask_zero=True, name="words")(beside)
    y = keras.layers.LSTM(5)(keras.layers.Add(name="sum")([first, words]))
    model = keras.Model([given, beside], keras.layers.Dense(5)(y))
    pm = networks.pipeline(model, scheme="1f1b", compression="int4", cuts=("first", "words"), microbatches=2)
    networks.fit(pm, [x, tokens], np.arange(60) % 5, epochs=2)
    assert np.isfinite(pm.evaluate([x, tokens], np.arange(60) % 5, verbose=0)[0])
    numbers, ids, mask = 10 * 6 * 4, 4 * 10 * 6, 10 * 6
    message = 8 + numbers // 2 + 4 * math.ceil(numbers / 64)  # with the sizes of two dimensions
    down = [each for each in pm.trace.transfers if each.op == "F"]
    assert {each.size_bytes for each in down if each.from_stage == 0} == {message + ids}
    assert {each.size_bytes for each in down if each.from_stage == 1} == {2 * message + mask}


@pytest.mark.parametrize("spoiled", [math.nan, math.inf])
def test_an_activation_that_is_not_finite_is_not_hidden(spoiled):
    x, y = networks.data(20)
    pm = networks.pipeline(networks.mlp(2, 16), scheme="1f1b", cuts=("d0",), compression="int8")
    networks.fit(pm, x, y)
    x[3] = spoiled
    with pytest.raises(FloatingPointError):
        networks.fit(pm, np.concatenate([x, x]), np.concatenate([y, y]))


def test_a_message_is_as_large_as_planned():
    pm = piped("1f1b", "int8")
    plan = inside.planner(pm).partition(BATCH)
    options, rows = compression_of("int8"), microbatch_rows(BATCH, 3)
    planned = sum(options.sent_bytes((len(each) * WIDTH,)) for each in rows)
    sent = [each for each in pm.trace.transfers if each.op == "F" and each.from_stage == 0][: len(rows)]
    assert sum(each.size_bytes - 4 for each in sent) == planned
    assert plan.stages[0].crossing_bytes(options) == pytest.approx(planned, abs=4 * len(rows))


def test_what_would_become_larger_crosses_as_it_is():
    for name, dtype, coded in (("int8:2", "float16", False), ("int8", "float16", True), ("bfloat16", "float16", False)):
        spec = tf.TensorSpec([None, WIDTH], dtype)
        value = tf.cast(tf.random.stateless_normal((5, WIDTH), (0, 1)), dtype)
        cut = CutMessages(compression_of(name), 0, [spec], [True], ())
        message = cut.encoded(BoundaryTensors([value], [None]), tf.zeros([], tf.int64), 0)
        assert (message.tensors[0].dtype == tf.uint8) == coded
        assert size_bytes(message.tensors[0]) <= size_bytes(value) + tf.int32.size


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_numbers_that_the_other_type_has_arrive(name):
    """Such as those of a mask that softmax is to leave out."""
    spec, sent = tf.TensorSpec([None, 3], tf.float32), tf.constant([[0.0, -math.inf, 1.0], [math.inf, 0.5, -2.0]])
    cut = CutMessages(compression_of(name), 0, [spec], [True], ())
    found = cut.decoded(cut.encoded(BoundaryTensors([sent], [None]), tf.zeros([], tf.int64), 0))
    assert found.tensors[0].numpy().tolist() == sent.numpy().tolist()


class InBytes(Compression):
    """Loses nothing."""

    def encode(self, values):
        """Four bytes a number."""
        return [tf.bitcast(values, tf.uint8)]

    def decode(self, parts):
        """The numbers."""
        return tf.bitcast(parts[0], tf.float32)


class UpperHalves(Compression):
    """bfloat16 by hand: the upper 16 bits, rounded to the nearest, ties to even; how many there are, twice."""

    def encode(self, values):
        """Two bytes a number, and parts of other numbers of dimensions."""
        bits = tf.bitcast(values, tf.uint32)
        odd = tf.bitwise.bitwise_and(
            tf.bitwise.right_shift(bits, tf.constant(16, tf.uint32)), tf.constant(1, tf.uint32)
        )
        upper = tf.bitwise.right_shift(bits + tf.constant(0x7FFF, tf.uint32) + odd, tf.constant(16, tf.uint32))
        return [tf.size(values), tf.cast(upper, tf.uint16), tf.fill([1, 2], tf.size(values))]

    def decode(self, parts):
        """The numbers."""
        count, upper, again = parts
        with tf.control_dependencies([tf.debugging.assert_equal(again, tf.fill([1, 2], count))]):
            return tf.bitcast(tf.bitwise.left_shift(tf.cast(upper, tf.uint32), tf.constant(16, tf.uint32)), tf.float32)

    def sent_bytes(self, shape, item_bytes=4):
        """Two a number, and of the rest."""
        return 2 * math.prod(shape) + 12


@pytest.mark.parametrize(("own", "same"), [(InBytes(), None), (UpperHalves(), "bfloat16")], ids=["all", "half"])
@pytest.mark.parametrize(
    ("scheme", "threads"),
    parameters.combinations(
        ("1f1b", "spectrain", "zb-v"), (False, True), default=[("1f1b", False), ("1f1b", True), ("spectrain", False)]
    ),
)
def test_one_of_ones_own_crosses_cuts(scheme, threads, own, same, monkeypatch):
    """The last minibatch is short. Bitwise what comes of none, or of the same one of the package."""
    if threads:
        inside.by_threads(monkeypatch)
    pm = piped(scheme, own)
    assert inside.is_program(pm) != threads
    networks.assert_equal(pm.get_weights(), piped(scheme, same).get_weights())
    x, _ = networks.data(ROWS)
    plain = pm.model.predict(x, verbose=0)
    np.testing.assert_allclose(pm.predict(x, verbose=0), plain, rtol=1e-5, atol=1e-6)
    assert own.sent_bytes((8,)) == (32 if same is None else 28)
    planned = inside.planner(pm).partition(BATCH).stages[0].crossing_bytes(own)
    assert planned == own.sent_bytes((BATCH * WIDTH,))
    sent = sum(each.size_bytes for each in pm.trace.transfers if each.op == "F" and each.from_stage == 0)
    sizes = ROWS // BATCH * planned + own.sent_bytes((ROWS % BATCH * WIDTH,))
    assert sizes <= sent / 2


@pytest.mark.wide
def test_one_of_ones_own_crosses_between_replicas_and_of_other_types():
    for own, same in ((InBytes(), None), (UpperHalves(), "bfloat16")):
        found = []
        for each in (own, same):
            pm = networks.pipeline(scheme="1f1b", compression=each, replicas=(2, 1, 2), microbatches=2)
            networks.fit(pm, *networks.data(ROWS), epochs=2)
            found.append(pm.get_weights())
        networks.assert_equal(*found)


@pytest.mark.parametrize("scheme", parameters.by_default(("1f1b", "spectrain"), "1f1b", wide=("1f1b", "spectrain")))
def test_a_pipeline_with_one_of_ones_own_that_is_stopped_goes_on_bitwise(scheme, tmp_path):
    assert_goes_on_bitwise(tmp_path, scheme=scheme, compression=UpperHalves())


def test_parts_over_a_cut_may_be_fewer_by_a_share_and_of_any_rows():
    class Largest(Compression):
        """The largest quarter with their places; an even number of elements."""

        def encode(self, values):
            pairs = tf.reshape(values, [-1, 2])
            places = tf.math.top_k(tf.abs(values), tf.size(pairs) // 4).indices
            return [places[:, tf.newaxis], tf.gather(values, places), tf.shape(values)]

        def decode(self, parts):
            return tf.scatter_nd(*parts)

    cut = CutMessages(Largest(), 0, [tf.TensorSpec([None, 2], tf.float32)], [True], ())
    for rows in (0, 1, 8):
        sent = tf.random.stateless_normal([rows, 2], (0, rows))
        there = cut.decoded(cut.encoded(BoundaryTensors([sent], [None]), tf.zeros([], tf.int64), 0)).tensors[0].numpy()
        least = np.sort(np.abs(sent).ravel())[rows * 2 - rows // 2 :].min(initial=math.inf)
        np.testing.assert_array_equal(there, np.where(np.abs(sent) >= least, sent, 0))


class InBlocks(InBytes):
    """Blocks of so many elements, of which values have whole ones."""

    def __init__(self, block):
        self.block = block

    def encode(self, values):
        return [tf.bitcast(tf.reshape(values, [-1, self.block]), tf.uint8)]

    def decode(self, parts):
        return tf.reshape(super().decode(parts), [-1])


@pytest.mark.parametrize("block", [1024, 4096, 11, 360])
def test_parts_over_a_cut_may_be_whole_blocks(block):
    cut = CutMessages(InBlocks(block), 0, [tf.TensorSpec([None, block], tf.float32)], [True], ())
    sent = tf.random.stateless_normal([3, block], (0, 1))
    there = cut.decoded(cut.encoded(BoundaryTensors([sent], [None]), tf.zeros([], tf.int64), 0)).tensors[0]
    np.testing.assert_array_equal(there, sent)


@pytest.mark.parametrize("threads", [False, True])
def test_one_of_ones_own_that_cannot_cross_is_refused(threads, monkeypatch):
    if threads:
        inside.by_threads(monkeypatch)

    class Kept(InBytes):
        error_feedback = True

    class InPairs(InBytes):
        def encode(self, values):
            return [tf.reshape(values, [values.shape[0] // 2, 2])]

    class Positive(InBytes):
        def encode(self, values):
            return [tf.boolean_mask(values, values > 0)]

    class OfAnyRank(InBytes):
        def encode(self, values):
            return [tf.ensure_shape(tf.numpy_function(lambda each: each, [values], tf.float32), None)]

    class Overflowing(InBytes):
        def encode(self, values):
            if (values.shape[0] or 0) > 1000:
                raise OverflowError("too many")
            return super().encode(values)

    for made in (pipetrain.OneFOneB, pipetrain.SpecTrain):
        with pytest.raises(
            ValueError, match=r"of no use to the next.*Kept\(\)' with error_feedback=True.*Try error_fee"
        ):
            made(compression=Kept())
    for wrong, said in (
        (InPairs(), r"InPairs\(\), whose encode.*Try tf.shape"),
        (Positive(), r"same number of bytes.*Positive\(\).*Try tensors of fixed shapes"),
        (OfAnyRank(), r"OfAnyRank\(\).*reshape"),
        (InBlocks(13), r"InBlocks\(block=13\), whose encode does not take \d+ elements \(.*13.*\). Try tf.pad"),
        (Overflowing(), r"Overflowing\(\), whose encode does not take \d+ elements \(.*too many\). Try tf.pad"),
    ):
        pm = networks.pipeline(networks.mlp(2, 16), scheme="1f1b", cuts=("d0",), compression=wrong)
        with pytest.raises(ValueError, match=said):
            networks.fit(pm, *networks.data(20))


def test_what_cannot_cross_is_refused():
    for wrong, said in (
        ("top-k", "Try one of: bfloat16"),
        (pipetrain.Int8(error_feedback=True), "error_feedback=False"),
    ):
        with pytest.raises(ValueError, match=said):
            pipetrain.OneFOneB(compression=wrong)
    with pytest.raises(ValueError, match="Unknown compression"):
        pipetrain.SpecTrain(compression="int9")


# What the replicas of a stage sum


def replicated(scheme, name, replicas=(2, 1, 2), **settings):
    """Of 50 rows in minibatches of 8 the last one has 2: with microbatches some replicas have none."""
    pieces = {} if scheme in ("vanilla", "spectrain") else {"microbatches": 2}
    given = {**pieces, **settings}
    pm = networks.pipeline(
        networks.mlp(DEPTH, WIDTH), scheme=scheme, replica_compression=name, replicas=replicas, **given
    )
    networks.fit(pm, *networks.data(ROWS), batch_size=BATCH, epochs=2)
    return pm


def of_numpy(options, microbatches, replicas=2):
    """A layer without a bias, the mean squared error, and what is sent by NumPy; random numbers are the package's."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(44, 8)).astype("float32"), rng.normal(size=(44, 4)).astype("float32")
    layer = keras.layers.Dense(4, use_bias=False)
    model = keras.Sequential([keras.Input((8,)), layer])
    weights, left = layer.get_weights()[0].astype(np.float64), np.zeros((replicas, 8, 4))
    scheme = pipetrain.OneFOneB(replica_compression=options)
    settings = {"stages": 1, "replicas": (replicas,), "microbatches": microbatches}
    pm = pipetrain.PipelineModel(model, devices=DEVICES[:replicas], scheme=scheme, **settings)
    pm.compile(keras.optimizers.SGD(0.1), "mse")
    pm.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for step, first in enumerate([*range(0, 44, 8)] * 2):
        batch = np.arange(first, min(first + 8, 44))
        total = np.zeros((8, 4))
        for replica in range(replicas):
            parts = [batch[m.start : m.stop] for m in microbatch_rows(len(batch), microbatches)]
            mine = np.concatenate(
                [part[r.start : r.stop] for part in parts for r in [rows_of(len(part), replica, replicas)]]
            )
            gradient = x[mine].T @ (x[mine] @ weights - y[mine]) * 2 / (len(batch) * 4) + left[replica]
            sent = arrived(options, gradient.astype(np.float32).ravel(), step, replica).reshape(8, 4)
            left[replica] = (gradient - sent) * options.error_feedback
            total += sent
        weights -= 0.1 * total
    return layer.get_weights()[0], weights


def arrived(options, given, step, replica):
    if isinstance(options, Int8):
        random = uniform((tf.constant(step, tf.int64), OF_REPLICAS), replica + 1, [given.size]).numpy()
        made = np.zeros(given.size)
        for first in range(0, given.size, options.block):
            part = slice(first, first + options.block)
            unit = np.abs(given[part]).max() / np.float32(options.levels)
            made[part] = np.floor(given[part] / unit + random[part]) * unit
        return made
    if options.name == "sign":
        return np.where(given >= 0, 1.0, -1.0) * np.abs(given).mean()
    return tf.cast(tf.cast(given, options.name), tf.float64).numpy()


@pytest.mark.parametrize(
    ("name", "microbatches"),
    parameters.combinations(("int8:5", "int4:8", "sign", "bfloat16"), (1, 3), default=[("int4:8", 3), ("sign", 1)]),
)
def test_sums_of_replicas_are_those_of_numpy(name, microbatches):
    np.testing.assert_allclose(*of_numpy(compression_of(name), microbatches), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "name"),
    parameters.combinations(
        ("1f1b", "zb-h1", "vanilla", "2bw"), EVERY, default=[("vanilla", "sign")], wide=[("1f1b", "int4")]
    ),
)
def test_what_replicas_sent_and_what_is_left_are_all_gradients(scheme, name):
    """With a rate of 1, weights move by what was sent in one step, or by all gradients without compression."""
    x, y = networks.data(20)
    found, pieces = [], {} if scheme == "vanilla" else {"microbatches": 2}
    for each in (None, name):
        model = networks.mlp(3, WIDTH)
        before = model.get_weights()
        way = {
            "scheme": scheme,
            "replica_compression": each,
            "cuts": ("d0",),
            "replicas": (2, 2),
            "stages": 2,
            **pieces,
        }
        pm = networks.pipeline(model, keras.optimizers.SGD(1.0), **way)
        networks.fit(pm, x, y, batch_size=20)
        left = {}
        for slot in inside.strategy(pm)._stages.slots():
            if slot.kind.startswith("residual"):
                left[id(slot.weight)] = left.get(id(slot.weight), 0) + keras.ops.convert_to_numpy(slot.variable)
        assert bool(left) == (each is not None and compression_of(each).error_feedback)
        after = zip(before, model.get_weights(), model.weights, strict=True)
        found.append([old - new + left.get(id(weight), 0) for old, new, weight in after])
    if compression_of(name).error_feedback:
        networks.assert_close(*found)


@pytest.mark.parametrize(
    ("scheme", "name"),
    parameters.combinations(
        ("1f1b", "spectrain", "zb-h1"), EVERY, default=[], wide=[("1f1b", "top-k"), ("spectrain", "int4")]
    ),
)
def test_threads_sum_what_functions_do(scheme, name, monkeypatch):
    in_functions = replicated(scheme, name)
    inside.by_threads(monkeypatch)
    by_threads = replicated(scheme, name)
    assert not inside.is_program(by_threads)
    networks.assert_close(by_threads.get_weights(), in_functions.get_weights())


@pytest.mark.wide
def test_whole_messages_are_no_compression():
    whole = replicated("1f1b", "top-k:1.0").get_weights()
    networks.assert_equal(replicated("1f1b", "none").get_weights(), replicated("1f1b", None).get_weights())
    networks.assert_close(whole, replicated("1f1b", None).get_weights())


@pytest.mark.parametrize(
    ("scheme", "name"),
    parameters.combinations(
        ("1f1b", "spectrain", "2bw"), EVERY, default=[], wide=[("1f1b", "top-k"), ("spectrain", "int4")]
    ),
)
def test_replicas_that_are_stopped_go_on_bitwise(scheme, name, tmp_path):
    way = {"scheme": scheme, "replica_compression": name, "replicas": (2, 1, 1)}
    assert_goes_on_bitwise(tmp_path, **way)


@pytest.mark.wide
def test_messages_of_replicas_are_as_large_as_planned(monkeypatch):
    for patch in (lambda _: None, inside.by_threads):
        patch(monkeypatch)
        pm = replicated("1f1b", "int8")
        stages, options = inside.planner(pm).partition(BATCH).stages, compression_of("int8")
        for stage in (0, 2):
            sent = {each.size_bytes for each in pm.trace.transfers if each.op == "R" and each.from_stage == stage}
            weights = inside.replicas(pm)[stage][0].variables
            sent -= {0}  # of one that had no rows
            assert sent == {sum(options.sent_bytes(each.shape) for each in weights)}
            planned = stages[stage].summed_bytes(options)
            assert [*sent] == pytest.approx([planned], rel=0.05)


@pytest.mark.wide
def test_rows_of_embeddings_are_summed_as_they_are():
    rows = np.arange(60 * 6).reshape(60, 6) % 20
    model = words()
    pm = networks.pipeline(
        model,
        scheme="1f1b",
        replica_compression="int4",
        cuts=(model.layers[1].name,),
        replicas=(2, 1),
        jit_compile=False,
    )
    networks.fit(pm, rows, np.arange(60) % 5, epochs=2)
    left = {id(slot.weight) for slot in inside.strategy(pm)._stages.slots() if slot.kind.startswith("residual")}
    assert left and id(pm.model.trainable_variables[0]) not in left
    assert np.isfinite(pm.evaluate(rows, np.arange(60) % 5, verbose=0)[0])


def test_sums_that_cannot_be_compressed_are_refused():
    with pytest.raises(
        ValueError, match=r"No stage has several devices.*replica_compression='int8'.*Try replicas=\(2, 1"
    ):
        networks.pipeline(scheme="1f1b", replica_compression="int8")
    for scheme in ("zb-v", "interleaved", "single", "all-reduce"):
        with pytest.raises((ValueError, TypeError), match="replica_compression"):
            networks.in_way(networks.small(), scheme=scheme, replica_compression="int8")
    with pytest.raises(ValueError, match="another loss scale"):
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
        networks.pipeline(optimizer=scaled, scheme="1f1b", replica_compression="int8", replicas=(2, 1, 1))
    with pytest.raises(ValueError, match="Momentum correction needs"):
        corrected = TopK(momentum_correction=True)
        networks.pipeline(scheme="spectrain", replica_compression=corrected, replicas=(2, 1, 1))


@pytest.mark.wide
def test_what_stages_keep_of_weights_that_they_share_is_each_ones_own():
    pm = networks.in_way(
        networks.tied_autoencoder(), scheme="1f1b", replica_compression="int4", replicas=(2, 1, 2), cuts=("d0", "d3")
    )
    pm.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    x, _ = networks.data(ROWS)
    networks.fit(pm, x, x)
    kept = [(id(each.weight), each.kind) for each in inside.strategy(pm)._stages.slots() if "residual" in each.kind]
    assert len({*kept}) == len(kept) and any("of_stage_2" in kind for _, kind in kept)


# What devices have not sent, where a run goes on with others


class Kept(keras.callbacks.Callback):
    """What devices keep when training begins, by weight and kind, each device's by its number."""

    def on_train_begin(self, logs=None):
        slots = [*inside.strategy(self.model)._stages.slots()]
        numbers = {id(each): n for n, each in enumerate(self.model.model.variables)}
        self.arrays = {f"{numbers[id(each.weight)]}/{each.kind}": each.variable.numpy() for each in slots}


def sums_of(arrays, kind):
    """What all devices keep of each weight together."""
    found = {}
    for name, array in arrays.items():
        weight, _, given = name.rpartition("/")
        if re.sub(r"(_of_stage_\d+)?_of_worker_\d+$", "", given) == kind:
            found[weight] = found.get(weight, 0) + array.astype(np.float64)
    return found


def gone_on(directory, before, after):
    """What is in the checkpoint of a run in one way, and what devices keep and say where it goes on in another."""
    run(directory, stop_after=6, **before)
    (path, *_) = sorted(directory.glob("step-*.npz"), reverse=True)
    there = {name.removeprefix("slot/"): each for name, each in np.load(path).items() if name.startswith("slot/")}
    kept = Kept()
    pm = pipeline(**after)
    with contextlib.suppress(InterruptedError):
        again = [PipelineCheckpoint(directory, every_steps=4), kept, Stop(1)]
        pm.fit(**arrays(), epochs=3, verbose=2, callbacks=again)
    return there, kept.arrays


def sgd(momentum=0.0):
    return keras.optimizers.SGD(0.05, momentum=momentum)


ALL = {"scheme": "all-reduce", "order": "none", "stages": None}
CUT = {"scheme": "1f1b", "microbatches": 2}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("before", "after", "momentum"),
    [
        (
            {**ALL, "compression": "top-k", "devices": DEVICES},
            {**ALL, "compression": "top-k", "devices": DEVICES[:2]},
            0.9,
        ),
        (
            {**CUT, "replica_compression": "int4", "replicas": (3, 1, 1)},
            {**CUT, "replica_compression": "sign", "replicas": (2, 2, 2)},
            0.0,
        ),
        (
            {"scheme": "spectrain", "replica_compression": "int4", "replicas": (3, 1, 2)},
            {"scheme": "1f1b", "replica_compression": "int4", "replicas": (2, 2), "stages": 2},
            0.0,
        ),
    ],
)
def test_what_devices_that_are_gone_had_not_sent_others_send(before, after, momentum, tmp_path, capsys):
    there, here = gone_on(tmp_path, {**before, "optimizer": sgd(momentum)}, {**after, "optimizer": sgd(momentum)})
    said = capsys.readouterr().out
    assert "Going on from" in said
    for kind in ("residual_of_momentum", "device_momentum") if momentum else ("residual",):
        were, are = sums_of(there, kind), sums_of(here, kind)
        assert were and were.keys() <= are.keys()
        for weight, each in were.items():
            assert np.abs(each).max() > 0
            np.testing.assert_allclose(are[weight], each, rtol=1e-5, atol=1e-7)
    assert "residual" not in said and "device_momentum" not in said


@pytest.mark.wide
def test_what_nobody_sends_any_more_is_said(tmp_path, capsys):
    """Of another scheme; and of workers that send how far weights have moved in place of gradients."""
    way = {**ALL, "compression": "int4", "devices": DEVICES[:2]}
    for name, other, told in (
        ("a", {"scheme": "single", "stages": None}, "residual of 2 devices left out"),
        ("b", {**way, "synchrony": "local:2"}, "momentums from zero; residual of 2 devices left out"),
    ):
        there, here = gone_on(tmp_path / name, way, other)
        assert told in capsys.readouterr().out
        assert sums_of(there, "residual") and not any(
            each.any() for each in sums_of(here, "residual_of_moves").values()
        )
