"""``global_clipnorm``: stages clip by the norm of all their gradients, as plain Keras does."""

from __future__ import annotations

import threading
import time

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf

from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.optimizer.gradient_scaling import clipped, squared_norm
from pipetrain.compute.optimizer.update import Update
from pipetrain.run.gradient_exchange import GradientExchange
from pipetrain.schemes.schedules import gpipe, one_forward_one_backward, orders

L = keras.layers
OPTIMIZERS = {
    "momentum": lambda **settings: keras.optimizers.SGD(0.05, momentum=0.9, **settings),
    "adam": lambda **settings: keras.optimizers.Adam(0.002, **settings),
    "adamw": lambda **settings: keras.optimizers.AdamW(0.002, weight_decay=0.05, **settings),
}
NEVER, SOMETIMES, ALWAYS = 1e3, 1.1, 0.05  # the MLP's gradients have norms between 0.9 and 1.8


def words(rows=50):
    """Sentences in which words come twice: rows of an embedding's gradient that are of the same word."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 5, (rows, 6)), rng.integers(0, 3, rows)


def reader():
    keras.utils.set_random_seed(0)
    layers = [L.Embedding(7, 4, name="embedding"), L.Flatten(), L.Dense(5, "tanh", name="between"), L.Dense(3)]
    return keras.Sequential([keras.Input((6,), dtype="int32"), *layers])


class Idle(L.Dense):
    """A dense layer with a weight that has no gradient."""

    def build(self, input_shape):
        super().build(input_shape)
        self.idle = self.add_weight(shape=(3,), name="idle")


def partly_frozen():
    """Its second stage of three has nothing to train; the first has a frozen layer and a weight without gradient."""
    keras.utils.set_random_seed(0)
    layers = [Idle(6, "tanh", name="a"), L.Dense(6, name="b"), L.Dense(6, "tanh", name="c"), L.Dense(5, name="d")]
    model = keras.Sequential([keras.Input((networks.FEATURES,)), *layers])
    model.layers[1].trainable = model.layers[2].trainable = False
    return model


def trained(model, optimizer, data, **settings):
    """The weights after batches of 16 rows, the last of fewer; in plain Keras where there are no other settings."""
    if settings:
        model = networks.in_way(model, **settings)
    model.compile(optimizer, networks.crossentropy())
    model.fit(*data, batch_size=16, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.fixture(scope="module")
def plain_keras():
    """Weights trained without a pipeline, each once."""
    known = {}

    def weights(optimizer, clipnorm):
        key = optimizer, clipnorm
        if key not in known:
            known[key] = trained(networks.mlp(4), OPTIMIZERS[optimizer](global_clipnorm=clipnorm), networks.data(100))
        return known[key]

    return weights


@pytest.mark.parametrize(
    ("scheme", "stages", "microbatches", "replicas", "optimizer", "clipnorm"),
    [
        ("vanilla", 1, None, None, "momentum", SOMETIMES),
        *parameters.widely(("gpipe", 1, 2, (2,), "momentum", ALWAYS), ("1f1b", 3, 2, (1, 3, 2), "momentum", SOMETIMES)),
        *parameters.rarely(
            ("gpipe", 2, 3, (1, 2), "adam", SOMETIMES),
            ("gpipe", 3, 1, None, "momentum", SOMETIMES),
            ("1f1b", 2, 3, None, "adamw", SOMETIMES),
            ("1f1b", 2, 4, None, "momentum", NEVER),
            ("single", None, None, None, "momentum", SOMETIMES),
        ),
    ],
)
def test_weights_equal_those_of_plain_keras(plain_keras, scheme, stages, microbatches, replicas, optimizer, clipnorm):
    settings = {"scheme": scheme, "microbatches": microbatches, "replicas": replicas}
    settings |= {"cuts": networks.cuts(4, stages)} if stages and stages > 1 else {"stages": stages}
    mine = OPTIMIZERS[optimizer](global_clipnorm=clipnorm)
    networks.assert_close(
        trained(networks.mlp(4), mine, networks.data(100), **settings), plain_keras(optimizer, clipnorm)
    )


@pytest.mark.wide
def test_the_thresholds_do_what_they_are_named(plain_keras):
    never, sometimes, always = (plain_keras("momentum", each) for each in (NEVER, SOMETIMES, ALWAYS))
    networks.assert_close(never, plain_keras("momentum", None), 1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(never, sometimes)) > 1e-3
    assert max(np.abs(a - b).max() for a, b in zip(sometimes, always)) > 1e-3


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "cuts", "optimizer", "settings"),
    [
        (reader, ("embedding",), "adam", {"microbatches": 3}),
        (reader, ("between",), "momentum", {"microbatches": 2, "replicas": (3, 1)}),
        (partly_frozen, ("b", "c"), "momentum", {"microbatches": 2, "replicas": (1, 2, 1)}),
    ],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_rows_of_embeddings_no_gradients_and_frozen_layers(model, cuts, optimizer, settings):
    data = words() if model is reader else networks.data(50)
    expected = trained(model(), OPTIMIZERS[optimizer](global_clipnorm=0.3), data)
    got = trained(model(), OPTIMIZERS[optimizer](global_clipnorm=0.3), data, scheme="1f1b", cuts=cuts, **settings)
    networks.assert_close(got, expected)


@pytest.mark.parametrize("factor", [0.0, 1e-3, 1.0, 1e30])
def test_the_rule_is_keras_own(factor):
    """A norm of nothing, one below the threshold, one above, and one too large for its square."""
    rows = tf.IndexedSlices(factor * tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), [0, 2, 0], [4, 2])
    gradients = [rows, None, tf.constant([factor, -factor])]
    expected = keras.optimizers.SGD(0.1, global_clipnorm=0.3)._clip_gradients(gradients)
    squares = tf.stack([squared_norm(gradients[:1]), squared_norm(gradients[1:]), squared_norm([])])
    got = clipped(gradients, squares, 0.3)
    assert got[1] is expected[1] is None
    for index in (0, 2):
        np.testing.assert_allclose(got[index], expected[index], rtol=1e-6)


@pytest.mark.wide
def test_gradients_of_zero_change_nothing():
    x, y = networks.data(32)
    pm = networks.pipeline(optimizer=OPTIMIZERS["momentum"](global_clipnorm=0.1), scheme="gpipe", cuts=("d2",))
    before = pm.get_weights()
    pm.fit(x, y, sample_weight=np.zeros(32), verbose=0)
    networks.assert_equal(pm.get_weights(), before)


@pytest.mark.parametrize("scheme", ["vanilla", "weight-stashing", "vertical-sync", "spectrain"])
def test_stages_that_update_at_different_times_are_refused(scheme):
    message = rf"global_clipnorm.*different times.*Received: scheme='{scheme}', optimizer=SGD.*Try clipnorm.*'1f1b'"
    with pytest.raises(ValueError, match=message):
        networks.pipeline(optimizer=OPTIMIZERS["momentum"](global_clipnorm=1.0), scheme=scheme)


@pytest.mark.wide
def test_an_exception_reaches_stages_that_wait_for_the_norm(monkeypatch):
    """The first stage is the last to finish a backward: all others wait for its norm by then."""
    inside.by_threads(monkeypatch)
    settings = {"scheme": "1f1b", "microbatches": 2, "replicas": (2, 1, 1), "cuts": networks.cuts(6, 3)}
    pm = networks.pipeline(optimizer=OPTIMIZERS["momentum"](global_clipnorm=0.1), **settings)
    data = networks.data(64)
    pm.fit(*data, batch_size=16, verbose=0)
    for method, k in (("backward", 0), ("squared_norm", 1), ("update", 2)):
        broken, original, calls = inside.replicas(pm)[k][0], getattr(Stage, method), []

        def breaks(self, *args, broken=broken, original=original, calls=calls):
            calls += [self] * (self is broken)
            if self is broken and len(calls) == 4:
                time.sleep(0.1)  # until all others wait
                raise KeyError("boom")
            return original(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Stage, method, breaks)
            with pytest.raises(KeyError, match="boom") as caught:
                pm.fit(*data, batch_size=16, verbose=0)
        assert f"stage {k}" in caught.value.__notes__[0]
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipetrain")]
    assert np.isfinite(pm.fit(*data, batch_size=16, verbose=0).history["loss"]).all()


@pytest.mark.wide
def test_delays_change_no_bit(monkeypatch):
    weights = []
    for delay_s in (0.0, 0.01):
        networks.delay(monkeypatch, delay_s, "backward", "squared_norm", "update")
        settings = {"scheme": "1f1b", "microbatches": 3, "replicas": (2, 1), "cuts": ("embedding",)}
        pm = networks.in_way(reader(), **settings)
        pm.compile(OPTIMIZERS["momentum"](global_clipnorm=0.1), networks.crossentropy())
        pm.fit(*words(), batch_size=16, epochs=2, shuffle=False, verbose=0)
        weights.append(pm.get_weights())
        for first, *others in inside.replicas(pm):
            for other in others:
                networks.assert_equal(other.weights(), first.weights())
    networks.assert_equal(*weights)


@pytest.mark.wide
def test_clipped_gradients_take_the_fast_step_and_others_know_of_no_norm(monkeypatch):
    inside.by_threads(monkeypatch)
    fast, made = [], []
    for owner, name, calls in ((Update, "_momentum_step", fast), (GradientExchange, "__init__", made)):
        original = getattr(owner, name)

        def counted(self, *args, original=original, calls=calls):
            calls.append(self)
            return original(self, *args)

        monkeypatch.setattr(owner, name, counted)
    for clipnorm in (None, 0.0, 1.0):
        fast.clear()
        optimizer = OPTIMIZERS["momentum"]() if clipnorm is None else OPTIMIZERS["momentum"](global_clipnorm=clipnorm)
        pm = networks.pipeline(optimizer=optimizer, scheme="gpipe", cuts=("d2",))
        pm.fit(*networks.data(16), batch_size=16, verbose=0)
        assert len(fast) == 2
        assert len(made) == (1 if clipnorm else 0)


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (4, 3), (3, 8)])
def test_no_order_of_actions_waits_for_ever_at_the_flush(schedule, stages, microbatches):
    """Nobody goes on after a minibatch's last backward before all have done theirs."""
    todo = [list(order) for order in orders(schedule, stages, 3, microbatches)]
    done, flushed = set(), [0] * stages
    while any(todo):
        before = len(done)
        for k, order in enumerate(todo):
            if not order or flushed[k] > min(flushed):
                continue
            op, i = order[0].op, order[0].microbatch
            needed = ("F", k - 1, i) if op == "F" else ("B", k + 1, i)
            if needed[1] in (-1, stages) or needed in done:
                done.add((op, k, i))
                order.pop(0)
                flushed[k] += op == "B" and (i + 1) % microbatches == 0
        assert len(done) > before
