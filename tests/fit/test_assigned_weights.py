"""Layers that assign to their own trained weights while they run, as SpectralNormalization does."""

from __future__ import annotations

from functools import cache

import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf

import pipetrain
from pipetrain.run.program_runner import ProgramRunner

L = keras.layers
ROWS = 12


def normalized():
    """Dense, convolutional and regularized layers whose kernels are divided by their largest singular value."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((6, 4))
    x = L.SpectralNormalization(L.Dense(5), name="dense")(x)
    x = L.SpectralNormalization(L.Conv1D(6, 3, activation="tanh"), power_iterations=2, name="conv")(x)
    x = L.SpectralNormalization(L.Dense(5, "tanh", kernel_regularizer="l2"), name="regular")(L.Flatten()(x))
    return keras.Model(inputs, L.Dense(3, name="last")(x))


class Decaying(L.Dense):
    """A layer that reads its kernel, and in training leaves half of it."""

    def call(self, inputs, training=False):
        outputs = super().call(inputs, training=training)
        if training:
            self.kernel.assign(self.kernel * 0.5)
        return outputs + keras.ops.matmul(inputs, self.kernel)


def decaying():
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((6, 4))
    x = Decaying(5, name="dense")(L.Dense(4, "tanh", name="before")(x))
    x = L.Conv1D(3, 3, activation="tanh", name="conv")(x)
    return keras.Model(inputs, L.Dense(3, name="last")(L.Flatten(name="regular")(x)))


MODELS = {"spectral": normalized, "decaying": decaying}


def trained(model, jit_compile=False, **settings):
    """The weights, the losses of two epochs and of an evaluation."""
    fitted = networks.in_way(model, **settings) if settings else model
    fitted.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit_compile)
    x, y = networks.normal(5 * ROWS, 6, 4), networks.normal(5 * ROWS, 3)
    history = fitted.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, epochs=2).history
    return [*model.get_weights(), np.array([*history["loss"], fitted.evaluate(x, y, batch_size=ROWS, verbose=0)])]


@cache
def of_plain_keras(name):
    return trained(MODELS[name]())


WAYS = [
    {"scheme": "1f1b", "microbatches": 1, "cuts": ("dense", "conv")},
    {"scheme": "gpipe", "microbatches": 1, "cuts": ("conv",), "recompute": True},
    {"scheme": "1f1b", "microbatches": 1, "cuts": ("conv",), "replicas": (2, 1)},
    {"scheme": "1f1b", "microbatches": 1, "cuts": ("dense",), "jit_compile": True},
    {"scheme": "single"},
    {"scheme": "data-parallel", "devices": ("CPU:0", "CPU:1")},
]
OFTEN = [("spectral", WAYS[0]), ("decaying", WAYS[1]), ("spectral", WAYS[2]), ("decaying", WAYS[5])]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "settings"), parameters.combinations(list(MODELS), WAYS, default=OFTEN))
def test_synchronous_schemes_train_as_plain_keras(name, settings):
    networks.assert_close(trained(MODELS[name](), **settings), of_plain_keras(name))


def test_each_microbatch_assigns():
    """The kernel is halved once for each; with a learning rate of nothing nothing else changes it."""
    model = decaying()
    kernel = model.get_layer("dense").kernel.numpy()
    pm = pipetrain.PipelineModel(model, scheme="1f1b", microbatches=4, cuts=("conv",))
    pm.compile(keras.optimizers.SGD(0.0), "mse")
    pm.fit(networks.normal(ROWS, 6, 4), networks.normal(ROWS, 3), batch_size=ROWS, verbose=0)
    np.testing.assert_array_equal(model.get_layer("dense").kernel.numpy(), kernel / 16)


def test_a_weight_that_is_read_after_it_is_assigned_gets_the_gradient_of_both_reads():
    """The second one reads half of it, but its gradient is not halved: the kernel is, and then 2 are subtracted."""
    inputs = keras.Input((1,))
    model = keras.Model(inputs, Decaying(1, kernel_initializer="ones", name="dense")(inputs))
    pm = pipetrain.PipelineModel(model, scheme="1f1b", microbatches=1, stages=1)
    pm.compile(keras.optimizers.SGD(0.125), lambda y, predicted: predicted)
    pm.fit(np.ones((4, 1), "float32"), np.zeros((4, 1), "float32"), batch_size=4, verbose=0)
    assert model.get_layer("dense").kernel.numpy() == 0.5 - 0.125 * 2


class Counting(L.Layer):
    """Adds 1 to its weight in each forward."""

    def build(self, shape):
        self.count = self.add_weight((), "zeros", name="count")

    def call(self, x):
        self.count.assign(self.count + 1)
        return x + 0 * self.count


class Bounded(L.Layer):
    """Fails for great numbers."""

    def call(self, x):
        return x + tf.gather(tf.zeros([4]), 9 * tf.cast(tf.reduce_max(x) > 100, tf.int32))


def test_actions_that_are_made_again_to_find_what_has_failed_change_nothing(monkeypatch):
    """Where TensorFlow does not tell it."""
    inputs = keras.Input((4,))
    x = Counting(name="counting")(L.Dense(4, kernel_initializer="ones")(inputs))
    model = keras.Model(inputs, Bounded()(L.Dense(4, kernel_initializer="ones")(x)))
    pm = pipetrain.PipelineModel(model, cuts=("counting",), scheme="1f1b", microbatches=2)
    pm.compile(keras.optimizers.SGD(0.0), "mse")
    data = np.full((24, 4), 0.01, "float32")
    networks.fit(pm, data, data, batch_size=8)
    assert float(model.get_layer("counting").count) == 6
    data[12:] = 1000
    monkeypatch.setattr(ProgramRunner, "_name", lambda *given: False)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        networks.fit(pm, data, data, batch_size=8)
    assert "stage 1, forward of minibatch 1, microbatch 1 (action 1F3)" in caught.value.__notes__[-1]
    assert float(model.get_layer("counting").count) == 10
