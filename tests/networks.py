"""Small networks and data for the tests."""

from __future__ import annotations

import random
import time
from functools import cache

import inside
import keras
import numpy as np
import tensorflow as tf

import pipetrain
from pipetrain.compute import keras_private
from pipetrain.compute.functions.stage import Stage
from pipetrain.frontend import runner_fit
from pipetrain.schemes.options import EVERY_OPTION, with_options
from pipetrain.schemes.table import UNCUT

FEATURES, CLASSES = 12, 5


def draw_from(seed):
    """What Keras' layers and initializers draw from now on is by this seed; TensorFlow's own seed stays as it is.

    ``keras.utils.set_random_seed`` sets that too, for which TensorFlow forgets all functions that it has prepared.
    """
    random.seed(seed)
    keras_private.set_global_attribute(keras_private.GLOBAL_SEED, None)


def mlp(depth=6, width=16, seed=0, name=None):
    """A tanh MLP: ``depth`` dense layers named d0, d1, ..."""
    draw_from(seed)
    layers = [keras.layers.Dense(width, activation="tanh", name=f"d{n}") for n in range(depth - 1)]
    layers = [keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES, name=f"d{depth - 1}")]
    return keras.Sequential(layers, name=name)


class Transposed(keras.layers.Layer):
    """``activation(x @ kernel.T + bias)`` with the kernel of another layer."""

    def __init__(self, kernel, activation, **settings):
        super().__init__(**settings)
        self.kernel, self.activation = kernel, keras.activations.get(activation)

    def build(self, shape):
        self.bias = self.add_weight((self.kernel.shape[0],), "zeros", name="bias")

    def call(self, x):
        return self.activation(keras.ops.matmul(x, keras.ops.transpose(self.kernel)) + self.bias)


TIED = {3: 2, 4: 1, 5: 0}  # the layers of ``tied_autoencoder`` that have the transposed kernel of another


def tied_autoencoder(seed=0):
    """Six layers d0 to d5, as an autoencoder has them: the last three have the transposed kernels of the first."""
    draw_from(seed)
    x = y = keras.Input((FEATURES,))
    encoder = [keras.layers.Dense(width, activation="tanh", name=f"d{n}") for n, width in enumerate((10, 8, 6))]
    for layer in encoder:
        y = layer(y)
    for n, (source, activation) in enumerate(zip(encoder[::-1], ("tanh", "tanh", "linear")), start=3):
        y = Transposed(source.kernel, activation, name=f"d{n}")(y)
    return keras.Model(x, y)


def tied_layers(model):
    """The (kernel, bias) pairs of ``tied_autoencoder``; tied layers have no kernel of their own."""
    layers = [model.get_layer(f"d{n}") for n in range(6)]
    return [(None if n in TIED else layer.kernel.numpy(), layer.bias.numpy()) for n, layer in enumerate(layers)]


def convolutional_layers():
    """An input, a convolution with state, a draw and a penalty behind it, and a dense layer."""
    return [
        keras.Input((8, 8, 3)),
        keras.layers.Conv2D(4, 3, padding="same"),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.MaxPooling2D(),
        keras.layers.SpatialDropout2D(0.2, seed=3),
        keras.layers.Flatten(),
        keras.layers.Dense(5, kernel_regularizer="l2"),
    ]


def one_layer(layer, width=4):
    """The layer between two dense ones, of one seed."""
    draw_from(0)
    x = keras.Input((width,))
    first, last = keras.layers.Dense(width, name="first"), keras.layers.Dense(2, name="last")
    return keras.Model(x, last(layer(first(x))))


def normal(*shape):
    """The same normally distributed numbers at every call."""
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def ends(depth, stages):
    """As even as can be: the index after each stage's last layer."""
    return [depth * (n + 1) // stages for n in range(stages)]


def cuts(depth, stages):
    return [f"d{end - 1}" for end in ends(depth, stages)[:-1]]


def parts(scheme, *layers):
    """The argument that makes stages end at these layers, or as many parts where a scheme has no stages."""
    return {"stages": len(layers) + 1} if scheme in UNCUT else {"cuts": layers}


def data(rows=400, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES)).astype("float32")
    y = np.argmax(x @ rng.normal(size=(FEATURES, CLASSES)), axis=1).astype("int32")
    return x, y


def crossentropy(**settings):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def in_way(model, stages=None, scheme="spectrain", **settings):
    """A PipelineModel of a scheme by its name, whose own options are among the settings."""
    own = {name: settings.pop(name) for name in EVERY_OPTION if name in settings}
    return pipetrain.PipelineModel(model, stages, with_options(scheme, **own), **settings)


def pipeline(model=None, optimizer=None, jit_compile="auto", **settings):
    """A compiled PipelineModel, the MLP in three stages unless told otherwise."""
    model = mlp() if model is None else model
    if "stages" not in settings and "cuts" not in settings:
        copies = settings.get("scheme") == "data-parallel" and settings.get("devices")
        settings |= {} if copies else parts(settings.get("scheme"), *cuts(6, 3))
    pm = in_way(model, **settings)
    optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
    pm.compile(optimizer, loss=crossentropy(), metrics=["accuracy"], jit_compile=jit_compile)
    return pm


def fit(model, x, y, **settings):
    """``fit`` in small batches, the last one short, quietly and in order unless told otherwise."""
    return model.fit(x, y, **{"batch_size": 20, "shuffle": False, "verbose": 0, **settings})


def small():
    return mlp(3, 8, name="small")


def compiled(scheme, make=small, **settings):
    """A small network, compiled by itself if the scheme is "keras", else as a pipeline of two or three stages."""
    model = make()
    if scheme != "keras":
        pieces = 2 if scheme in ("gpipe", "1f1b") else None
        first = [layer.name for layer in model.layers if layer.weights][:-1][:2]
        model = pipetrain.PipelineModel(model, scheme=scheme, microbatches=pieces, **parts(scheme, *first))
    model.compile(**{"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": crossentropy(), **settings})
    return model


@cache
def _standard(scheme):
    model = compiled(scheme, optimizer=keras.optimizers.SGD(0.05), metrics=["accuracy"])
    return model, model.get_weights()


def fresh(scheme):
    """A small network with plain SGD and one metric, compiled once for all tests, with its first weights and rate.

    Only ``spectrain``, which predicts by the last step taken, remembers one of an earlier test.
    """
    model, weights = _standard(scheme)
    model.set_weights(weights)
    model.optimizer.learning_rate = 0.05
    model.optimizer.iterations.assign(0)
    return model


def begin_anew(pm, weights):
    """The first weights, and an optimizer that has gathered nothing."""
    pm.set_weights(weights)
    with inside.distribution(pm).scope():
        for variable in pm.optimizer.variables:
            if not variable.path.endswith("learning_rate"):
                variable.assign(np.zeros(variable.shape, variable.dtype))


def assert_alike(train, settings=None, make=small, scheme="1f1b"):
    """What ``train(model)`` gives, and the weights it leaves, are the same for Keras and for the pipeline.

    ``settings()`` are those of ``compile``, new for each model; without them the models are ``fresh``. Returns the
    pipeline and what it gave.
    """
    each = ("keras", scheme)
    single, pm = (compiled(one, make, **settings()) if settings else fresh(one) for one in each)
    want, got = (_numbers(train(model)) for model in (single, pm))
    keras.tree.assert_same_structure(got, want)
    for a, b in zip(keras.tree.flatten(got), keras.tree.flatten(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert_close(pm.get_weights(), single.get_weights())
    assert int(pm.optimizer.iterations) == int(single.optimizer.iterations)
    return pm, got


def _numbers(result):
    if isinstance(result, keras.callbacks.History):
        result = result.history
    if isinstance(result, tuple):
        return tuple(map(_numbers, result))
    return without_figures(result) if isinstance(result, dict) else result


def without_figures(history):
    """A pipeline's history as plain Keras has it: without its speed and its bubble."""
    return {name: values for name, values in history.items() if name not in runner_fit.NAMES}


def assert_layer_trains_as_in_plain_keras(make):
    """The layer that ``make()`` gives, in a stage of its own."""
    x, y, weights = normal(32, 4), normal(32, 2), []
    for pipeline in (False, True):
        model = one_layer(make())
        if pipeline:
            model = pipetrain.PipelineModel(model, stages=3, scheme="1f1b", microbatches=1)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        fit(model, x, y, batch_size=8)
        weights.append(model.get_weights())
    assert_close(weights[1], weights[0], 1e-5)


def assert_has_the_weights_of_all_steps(pm, single, data, directory):
    """Evaluation, prediction, files and another step, of a trained model and of plain Keras trained alike."""
    np.testing.assert_allclose(pm.evaluate(*data, verbose=0), single.evaluate(*data, verbose=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pm.predict(data[0], verbose=0), single.predict(data[0], verbose=0), atol=1e-5)
    pm.save(directory / "model.keras")
    assert_equal(keras.models.load_model(directory / "model.keras").get_weights(), pm.get_weights())
    pm.train_on_batch(*data)
    single.train_on_batch(*data)
    assert_close(pm.get_weights(), single.get_weights())


def assert_close(actual, expected, tolerance=1e-5):
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def assert_equal(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(got, want)


def delay(monkeypatch, longest_s, *methods):
    """Every stage waits before each of these, a time of its own, the same in every run; in traced functions, too."""
    pause = random.Random(7)
    for name in methods:
        original = getattr(Stage, name)

        def late(self, *args, original=original):
            return after(pause.uniform(0, longest_s), lambda: original(self, *args))

        monkeypatch.setattr(Stage, name, late)


def after(seconds, call):
    """The call, so many seconds later; in a function that is traced, whenever that runs."""
    if not tf.inside_function():
        time.sleep(seconds)
        return call()
    with tf.control_dependencies([tf.numpy_function(lambda: time.sleep(seconds) or np.float32(0), [], tf.float32)]):
        return call()
