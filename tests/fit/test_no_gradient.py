"""Weights that no gradient reaches stay as they are, wherever the model is cut, and the others train."""

from __future__ import annotations

from functools import cache

import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf

import pipetrain
from pipetrain.schemes.table import NAMES

L = keras.layers
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
}


class Stopped(L.Layer):
    def call(self, x):
        return tf.stop_gradient(x)


def dense(name, width=6, **settings):
    return L.Dense(width, "tanh", name=name, **settings)


def stopped():
    """A stage of weights, two layers, without a gradient, and one that has some of both kinds."""
    x = keras.Input((networks.FEATURES,))
    y = Stopped(name="stop")(dense("third")(dense("second")(dense("first")(x))))
    return keras.Model(x, L.Dense(networks.CLASSES, name="last")(dense("fourth")(y)))


def without_loss():
    """The second output, the model's end, has no loss."""
    x = keras.Input((networks.FEATURES,))
    y = dense("second")(dense("first")(x))
    return keras.Model(x, [L.Dense(networks.CLASSES, name="last")(y), dense("third")(dense("fourth")(y))])


def shared(**settings):
    """A layer that is called in two stages, each time in front of what stops gradients."""
    x = keras.Input((networks.FEATURES,))
    twice = L.Dense(networks.FEATURES, name="twice", **settings)
    y = Stopped(name="stop")(twice(x))
    z = Stopped(name="again")(twice(dense("middle", networks.FEATURES)(y)))
    return keras.Model(x, L.Dense(networks.CLASSES, name="last")(dense("end")(L.Add()([y, z]))))


def frozen_tail():
    x = keras.Input((networks.FEATURES,))
    y = dense("third", trainable=False)(dense("second")(dense("first")(x)))
    return keras.Model(x, L.Dense(networks.CLASSES, trainable=False, name="last")(y))


def frozen_middle():
    x = keras.Input((networks.FEATURES,))
    y = dense("third", trainable=False)(dense("second", trainable=False)(dense("first")(x)))
    return keras.Model(x, L.Dense(networks.CLASSES, name="last")(y))


def largest():
    """What comes before the largest element's place has no gradient."""
    x = keras.Input((networks.FEATURES,))
    place = keras.ops.argmax(dense("second")(dense("first")(x)), axis=-1)
    y = L.Embedding(6, 6, name="embedding")(place)
    return keras.Model(x, L.Dense(networks.CLASSES, name="last")(dense("fourth")(y)))


MODELS = {
    stopped: [("first",), ("third",), ("stop",), ("second", "stop", "fourth")],
    without_loss: [("second",), ("last",), ("first", "second", "fourth", "last")],
    frozen_tail: [("second",), ("third",), ("first", "second", "third")],
    frozen_middle: [("first", "second", "third"), ("second",)],
    largest: [("second",), ("embedding",), ("first", "second", "embedding")],
}
CUTS = [
    pytest.param(model, cuts, marks=() if cuts == several[-1] else pytest.mark.slow)
    for model, several in MODELS.items()
    for cuts in several
]


def trained(model, optimizer="momentum", **settings):
    keras.utils.set_random_seed(0)
    built = model()
    pm = networks.in_way(built, **settings) if settings else built
    loss = networks.crossentropy()
    pm.compile(OPTIMIZERS[optimizer](), [loss, None] if model is without_loss else loss)
    networks.fit(pm, *networks.data(120))
    assert int(pm.optimizer.iterations.numpy()) == 6
    return pm.get_weights()


plain_keras = cache(trained)  # once for all cuts


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:.*radient")
@pytest.mark.parametrize(("model", "cuts"), CUTS)
def test_the_cut_does_not_matter(model, cuts):
    networks.assert_close(trained(model, cuts=cuts, scheme="1f1b"), plain_keras(model))


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:.*radient")
@pytest.mark.parametrize(
    ("optimizer", "scheme"),
    parameters.combinations(list(OPTIMIZERS), ["gpipe", "1f1b"], default=[("clipped", "gpipe"), ("decay", "1f1b")]),
)
def test_nor_do_optimizers_microbatches_and_replicas(optimizer, scheme):
    replicas = (2, 2, 1) if scheme == "1f1b" else (1, 1, 1)
    got = trained(stopped, optimizer, cuts=("third", "stop"), scheme=scheme, replicas=replicas)
    networks.assert_close(got, plain_keras(stopped, optimizer), 2e-5)


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:.*radient")
@pytest.mark.parametrize("optimizer", parameters.by_default(["momentum", "decay", "rmsprop"], "decay"))
@pytest.mark.parametrize("scheme", parameters.by_default(NAMES, "spectrain", "2bw"))
def test_in_every_scheme_such_weights_stay_and_the_others_train(scheme, optimizer):
    if scheme == "spike-compensation" and optimizer != "momentum":
        pytest.skip("for SGD with momentum")
    keras.utils.set_random_seed(0)
    before = stopped().get_weights()
    how = {"stages": 1} if scheme in ("single", "data-parallel") else {"cuts": ("first", "stop")}
    after = trained(stopped, optimizer, scheme=scheme, **how)
    for n, (old, new) in enumerate(zip(before, after)):
        assert np.array_equal(old, new) == (n < 6), n


def test_which_weights_have_no_gradient_is_said_once():
    keras.utils.set_random_seed(0)
    pm = pipetrain.PipelineModel(stopped(), cuts=("stop",), scheme="1f1b")
    pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
    with pytest.warns(UserWarning) as said:
        networks.fit(pm, *networks.data(60), epochs=2)
    (message,) = [str(each.message) for each in said if "gradient" in str(each.message)]
    assert "first/kernel, first/bias, second/kernel" in message and "last" not in message


@pytest.mark.parametrize("scheme", ["spectrain", "1f1b"])
def test_no_gradient_at_all_is_refused_before_training(scheme):
    x = keras.Input((networks.FEATURES,))
    y = Stopped(name="stop")(dense("second")(dense("first")(x)))
    pm = pipetrain.PipelineModel(keras.Model(x, y), cuts=("first",), scheme=scheme)
    pm.compile(keras.optimizers.SGD(0.05), "mse")
    with pytest.raises(ValueError, match=r"No gradient.*Received:.*first/kernel.*second/bias.*Try"):
        networks.fit(pm, networks.data(40)[0], np.zeros((40, 6)))


@pytest.mark.filterwarnings("ignore:.*any trainable weights")
def test_a_model_without_trainable_weights_runs_as_in_plain_keras():
    def run(pipelined):
        keras.utils.set_random_seed(0)
        model = networks.mlp(3)
        model.trainable = False
        pm = pipetrain.PipelineModel(model, cuts=("d0",), scheme="1f1b") if pipelined else model
        pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
        return networks.fit(pm, *networks.data(60)).history["loss"]

    np.testing.assert_allclose(run(True), run(False), rtol=1e-5)


class Centering(L.Layer):
    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return x - self.mean


@pytest.mark.wide
def test_no_gradient_flows_through_what_a_layer_assigns():
    networks.assert_layer_trains_as_in_plain_keras(Centering)


@pytest.mark.wide
@pytest.mark.parametrize(
    "optimizer", parameters.by_default([keras.optimizers.SGD, keras.optimizers.AdamW], keras.optimizers.AdamW)
)
def test_shared_weights_without_a_gradient_are_predicted_as_they_stay(optimizer):
    """With weight decay too: as if their layer was frozen."""
    trained = []
    for settings in ({}, {"trainable": False}):
        keras.utils.set_random_seed(0)
        model = shared(**settings)
        pm = pipetrain.PipelineModel(model, scheme="spectrain", cuts=("stop", "middle"))
        pm.compile(optimizer(0.01, weight_decay=0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = networks.data(rows=8 * 16)
        pm.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        trained.append({weight.path: weight.numpy() for weight in model.weights})
    for path, wanted in trained[1].items():
        np.testing.assert_allclose(trained[0][path], wanted, atol=1e-6, err_msg=path)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["vanilla", "1f1b"])
def test_a_frozen_beginning_of_open_length(scheme):
    """Nothing is sent back, and of what is sent the sizes are seen when it is."""
    weights = []
    for stages in (1, 2):
        keras.utils.set_random_seed(0)
        x = keras.Input((None,), dtype="int32")
        y = L.GlobalAveragePooling1D()(L.Embedding(9, 4, trainable=False, name="words")(x))
        model = keras.Model(x, L.Dense(networks.CLASSES)(y))
        settings = {"cuts": ("words",), "scheme": scheme} if stages > 1 else {"stages": 1, "scheme": "single"}
        pm = networks.in_way(model, **settings)
        pm.compile("sgd", networks.crossentropy())
        networks.fit(pm, np.arange(160).reshape(40, 4) % 9, np.arange(40) % networks.CLASSES)
        weights.append(pm.get_weights())
        assert not any(each.size_bytes for each in pm.trace.transfers if each.op == "B")
    networks.assert_close(*weights)
