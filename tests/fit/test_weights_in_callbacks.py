"""Callbacks read and write the model's weights within an epoch, in every way to get them, as in plain Keras."""

from __future__ import annotations

from functools import cache

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import pipetrain

L = keras.layers
X, _ = networks.data(60)
WAYS = {
    "1f1b": {"scheme": "1f1b", "microbatches": 1, "cuts": ("norm", "drop")},
    "gpipe": {"scheme": "gpipe", "microbatches": 1, "recompute": True, "cuts": ("norm",)},
    "zb-v": {"scheme": "zb-v", "microbatches": 1, "stages": 2, "devices": ("CPU:0",)},
    "single": {"scheme": "single"},
}
OF_PARTS = {  # of minibatches: they have no statistics of a whole one, and other random numbers
    "microbatches": {"scheme": "1f1b", "microbatches": 2, "cuts": ("a",)},
    "replicas": {"scheme": "1f1b", "microbatches": 1, "cuts": ("a",), "replicas": (2, 1)},
    "all-reduce": {"scheme": "all-reduce", "stages": 2, "order": "none"},
    "late": {"scheme": "all-reduce", "stages": 2, "order": "caramel"},
    "parameter-server": {"scheme": "parameter-server", "stages": 2, "order": "none"},
    "grid": {"scheme": "grid", "stages": 2, "grid": (2, 1)},
    "coded-reduce": {"scheme": "coded-reduce", "children": 2, "devices": ("CPU:0", "CPU:1")},
}


class Annealed(L.Layer):
    """A penalty whose factor a callback raises, as in a variational autoencoder."""

    def build(self, shape):
        self.beta = self.add_weight(shape=(), initializer="ones", trainable=False, name="beta")

    def call(self, h):
        self.add_loss(0.01 * self.beta * keras.ops.mean(h**2))
        return h


def model_of(stateful):
    """Trained weights, a penalty, and a model within the model; if it is ``stateful``, statistics and a seed."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((networks.FEATURES,))
    layers = [keras.Input((8,)), L.Dense(6, "tanh", name="within"), Annealed(name="penalty")]
    nested = keras.Sequential(layers, name="nested")
    norm = L.BatchNormalization(name="norm") if stateful else L.LayerNormalization(name="norm")
    drop = L.Dropout(0.2, seed=1, name="drop") if stateful else L.Activation("relu", name="drop")
    h = drop(nested(norm(L.Dense(8, "tanh", name="a")(inputs))))
    return keras.Model(inputs, L.Dense(networks.CLASSES, name="last")(h))


def kernel(model):
    return model.get_layer("a").kernel


def beta(model):
    return model.get_layer("nested").get_layer("penalty").beta


def seed(model):
    return model.get_layer("drop").seed_generator.state


def inner(model):
    """The model that a pipeline trains."""
    return getattr(model, "inner", model)


def slots(model):
    """What the optimizer has gathered: before its first step Keras has not made any."""
    return [each for each in model.optimizer.variables if "momentum" in each.path]


class Before:
    """What a program may have from before ``fit``: functions that were traced, TensorFlow's variables."""

    def __init__(self, model):
        self.variable, self._model = kernel(model).value, inner(model)
        self.norm = tf.function(lambda: tf.norm(kernel(model)))
        self.halve = tf.function(lambda: kernel(model).assign(0.5 * kernel(model)))
        self.outputs = tf.function(lambda x: self._model(x, training=False))
        weights = model.get_weights()
        self.norm(), self.halve(), self.outputs(X[:2]), self._model.predict(X, batch_size=60, verbose=0)
        model.set_weights(weights)


def set_layer(model, before):
    layer = model.get_layer("nested").get_layer("within")
    layer.set_weights([0.9 * each for each in layer.get_weights()])


def step_along_a_gradient(model, before):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(X[:10], training=False) ** 2)
    values = [each.value for each in model.trainable_variables]
    for value, gradient in zip(values, tape.gradient(loss, values)):
        value.assign_sub(0.1 * gradient)


WRITES = {
    "clipped": lambda model, before: kernel(model).assign(keras.ops.clip(kernel(model), -0.1, 0.1)),
    "layer": set_layer,
    "added": lambda model, before: model.trainable_variables[-1].assign_add(np.full(networks.CLASSES, 0.1, "float32")),
    "subtracted": lambda model, before: model.layers[-1].bias.assign_sub(np.full(networks.CLASSES, 0.1, "float32")),
    "variable of TensorFlow": lambda model, before: before.variable.assign(0.9 * before.variable),
    "inner model": lambda model, before: [each.assign(0.9 * each.value) for each in inner(model).weights[:2]],
    "statistics": lambda model, before: model.get_layer("norm").moving_mean.assign(np.zeros(8, "float32")),
    "annealed": lambda model, before: beta(model).assign(beta(model) + 1.0),
    "seed": lambda model, before: seed(model).assign(seed(model) + keras.ops.cast([3, 0], seed(model).dtype)),
    "gradient": step_along_a_gradient,
    "slots": lambda model, before: [slot.assign(0.5 * slot.value) for slot in slots(model)],
    "all weights": lambda model, before: model.set_weights([0.9 * each for each in model.get_weights()]),
    "traced function": lambda model, before: before.halve(),
    "nothing": lambda model, before: None,
}

READS = {
    "all weights": lambda model, before: model.get_weights(),
    "layer": lambda model, before: model.get_layer("a").get_weights(),
    "numpy": lambda model, before: kernel(model).numpy(),
    "value": lambda model, before: kernel(model).value.numpy(),
    "array": lambda model, before: np.asarray(kernel(model)),
    "text": lambda model, before: repr(kernel(model)),
    "operation of Keras": lambda model, before: keras.ops.sum(kernel(model)),
    "operation of TensorFlow": lambda model, before: tf.matmul(X[:3], before.variable),
    "slice": lambda model, before: kernel(model)[1],
    "call": lambda model, before: model(X[:3]),
    "inner model": lambda model, before: inner(model)(X[:3]),
    "its own predict": lambda model, before: inner(model).predict(X, batch_size=60, verbose=0),
    "nested model": lambda model, before: model.get_layer("nested")(X[:3, :8]),
    "layer's call": lambda model, before: model.get_layer("a")(X[:3]),
    "statistics": lambda model, before: model.get_layer("norm").moving_variance.numpy(),
    "factor": lambda model, before: float(beta(model)),
    "seed": lambda model, before: seed(model).numpy(),
    "slots": lambda model, before: [each.numpy() for each in slots(model)],
    "traced function": lambda model, before: before.norm(),
    "traced call": lambda model, before: before.outputs(X[:2]),
    "function traced now": lambda model, before: tf.function(lambda: tf.reduce_sum(kernel(model)))(),
    "penalties": lambda model, before: inner(model).losses,
    "non-trainable": lambda model, before: [each.numpy() for each in inner(model).non_trainable_variables],
    "outputs without state": lambda model, before: inner(model).stateless_call(
        inner(model).trainable_variables, inner(model).non_trainable_variables, X[:3]
    )[0],
}
MOMENTS = ["on_train_batch_begin", "on_train_batch_end"]


class Doing(keras.callbacks.Callback):
    """Does one thing after another, one in a moment of every step, and keeps what they give."""

    def __init__(self, moment, things, before):
        super().__init__()
        self.moment, self.seen, self._things, self._before = moment, {}, list(things.items()), before
        setattr(self, moment, self._do)

    def _do(self, batch, logs=None):
        name, do = self._things[batch % len(self._things)]
        given = do(self.model, self._before)
        self.seen[batch, name] = given if isinstance(given, str) else keras.tree.map_structure(np.asarray, given)


STATEFUL = {"statistics", "seed"}
KINDS = {"reads": READS, "writes": WRITES}


def trained(way, moment, kind, stateful):
    """What the things gave, and weights and losses of two epochs with as many steps as there are things."""
    things = {name: do for name, do in KINDS[kind].items() if stateful or name not in STATEFUL}
    model = model_of(stateful)
    fitted = model if way == "keras" else networks.in_way(model, **(WAYS | OF_PARTS)[way])
    fitted.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
    doing = Doing(moment, things, Before(fitted))
    x, y = networks.data(10 * len(things))
    history = networks.fit(fitted, x, y, batch_size=10, epochs=2, callbacks=[doing]).history
    return doing.seen, [*fitted.get_weights(), np.array(history["loss"])]


@cache
def of_plain_keras(moment, kind, stateful):
    return trained("keras", moment, kind, stateful)


EVERY = [*WAYS, *OF_PARTS]
OFTEN = [("1f1b", MOMENTS[0], "reads"), ("1f1b", MOMENTS[0], "writes")]
OFTEN += [(way, MOMENTS[1], "writes") for way in ("late", "grid", "coded-reduce")]


@pytest.mark.wide
@pytest.mark.parametrize(("way", "moment", "kind"), parameters.combinations(EVERY, MOMENTS, list(KINDS), default=OFTEN))
def test_callbacks_read_and_write_as_in_plain_keras(way, moment, kind):
    seen, results = trained(way, moment, kind, way in WAYS)
    expected, wanted = of_plain_keras(moment, kind, way in WAYS)
    for key, value in expected.items() if kind == "reads" else ():
        if isinstance(value, str):
            assert seen[key].split("value")[0] == value.split("value")[0]
            continue
        for got, want in zip(keras.tree.flatten(seen[key]), keras.tree.flatten(value), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5, err_msg=str(key))
    networks.assert_close(results, wanted, 2e-5)


@pytest.mark.wide
@pytest.mark.parametrize("way", parameters.by_default([*WAYS, *OF_PARTS], "late"))
def test_a_count_of_steps_that_a_callback_sets(way):
    """By which Adam corrects its averages; reading it is no reason for a drain."""
    results = []
    for settings in (None, (WAYS | OF_PARTS)[way]):
        model = model_of(False)
        fitted = networks.in_way(model, **settings) if settings else model
        fitted.compile(keras.optimizers.Adam(0.01), networks.crossentropy())
        counts = []

        def begin_anew(batch, logs, fitted=fitted, counts=counts):
            counts.append(int(fitted.optimizer.iterations))
            if batch == 2:
                fitted.optimizer.iterations.assign(0)

        call = keras.callbacks.LambdaCallback(on_train_batch_end=begin_anew)
        networks.fit(fitted, *networks.data(100), callbacks=[call])
        results.append([*fitted.get_weights(), np.array(counts)])
    networks.assert_close(results[1], results[0], 2e-5)


def untouched(model):
    """Whether variables and calls of functions are TensorFlow's own."""
    kinds = {type(each.value) for each in model.variables}
    return kinds == {type(keras.Variable(0.0).value)} and "call_function" not in vars(context.context())


@pytest.mark.wide
@pytest.mark.parametrize(
    "scheme", parameters.by_default(["1f1b", "spectrain", "2bw", "all-reduce"], "1f1b", "spectrain")
)
def test_a_fit_whose_callbacks_touch_nothing_never_drains_within_an_epoch(scheme, monkeypatch):
    pm, x, y = networks.compiled(scheme), *networks.data(100)
    steps = []
    rates = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append((float(pm.optimizer.learning_rate), logs["loss"]))
    )
    networks.fit(pm, x, y, callbacks=[rates])
    starts, runner = [], type(inside.runner(pm))
    start = runner._start
    monkeypatch.setattr(runner, "_start", lambda self: starts.append(self) or start(self))
    networks.fit(pm, x, y, epochs=2, callbacks=[rates])
    assert len(starts) == 2 and len(steps) == 15
    assert untouched(pm.model)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(["spectrain", "vanilla", "2bw"], "spectrain"))
def test_without_flushes_an_assignment_is_as_set_weights_in_its_place(scheme):
    """What is in flight is applied before it."""
    x, y = networks.data(200)

    def halved(assign):
        pm = networks.compiled(scheme)

        def halve(batch, logs):
            if batch in (2, 3, 7):
                assign(pm)

        networks.fit(pm, x, y, epochs=2, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=halve)])
        return pm.get_weights()

    def by_variables(pm):
        for variable in pm.model.weights:
            variable.assign(0.5 * variable)

    together = halved(lambda pm: pm.set_weights([0.5 * each for each in pm.get_weights()]))
    networks.assert_equal(halved(by_variables), together)


def test_what_raises_in_a_callback_that_read_weights_leaves_them_whole():
    pm = networks.compiled("spectrain")

    def fail(batch, logs):
        pm.model.layers[0].kernel.numpy()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        networks.fit(pm, *networks.data(100), callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=fail)])
    assert untouched(pm.model)
    networks.fit(pm, *networks.data(100))
    assert untouched(pm.model)


@pytest.mark.wide
def test_a_model_in_half_precision_reads_whole_weights_within_a_call():
    """The call in which a drain happens casts what it reads; what comes back from the stages is not cast."""
    results = []
    for pipelined in (False, True):
        keras.utils.set_random_seed(0)
        layers = [L.Dense(8, "tanh", dtype="mixed_bfloat16"), L.Dense(networks.CLASSES, dtype="float32")]
        model = keras.Sequential([keras.Input((networks.FEATURES,)), *layers])
        fitted = pipetrain.PipelineModel(model, scheme="1f1b", stages=2, microbatches=1) if pipelined else model
        fitted.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
        call = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, model=model: model(X[:2]))
        networks.fit(fitted, *networks.data(60), callbacks=[call])
        results.append(fitted.get_weights())
    networks.assert_close(results[1], results[0], 1e-3)
    kernel = results[1][0]
    rounded = keras.ops.cast(keras.ops.cast(kernel, "bfloat16"), "float32")
    assert not np.array_equal(kernel, rounded)
