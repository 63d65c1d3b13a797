"""Models of several kinds, on which schemes with the whole model on every device are tried."""

from __future__ import annotations

import keras
import networks


def convolutional():
    keras.utils.set_random_seed(1)
    return keras.Sequential(networks.convolutional_layers())


def words():
    """An embedding, with the gradients of its rows, and a recurrent layer."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(20, 4, mask_zero=True),
            keras.layers.LSTM(5),
            keras.layers.Dense(5),
        ]
    )


def branching():
    """Branches, a variable of two layers, and a weight regularizer."""
    keras.utils.set_random_seed(1)
    x = keras.Input((12,))
    shared = keras.layers.Dense(12, "tanh", kernel_regularizer="l2", activity_regularizer="l2")
    return keras.Model(x, keras.layers.Dense(5)(keras.layers.add([shared(x), shared(shared(x))])))


class Noise(keras.layers.Layer):
    """Draws from Keras' global seed."""

    def call(self, x, training=None):
        return x + 0.01 * keras.random.normal(keras.ops.shape(x)) if training else x


def noisy():
    keras.utils.set_random_seed(1)
    layers = [Noise(), keras.layers.Dropout(0.2), keras.layers.SpectralNormalization(keras.layers.Dense(8))]
    return keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(5)])


def stateful():
    """Whose states have a row for each of the minibatch."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Reshape((4, 3)), keras.layers.LSTM(5, stateful=True), keras.layers.Dense(5)]
    return keras.Sequential([keras.Input((12,), batch_size=10), *layers])
