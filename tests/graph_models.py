"""Models whose graphs are no chains, and data for them."""

from __future__ import annotations

import keras
import numpy as np

L = keras.layers


def skips():
    x = keras.Input((8,))
    a = L.Dense(8, activation="relu", name="a")(x)
    b = L.Dropout(0.3, seed=1)(L.Dense(8, name="b")(a))
    c = L.Add()([a, L.BatchNormalization()(b)])
    return keras.Model(x, L.Dense(3)(L.Concatenate()([c, x])))


def many_inputs_and_outputs():
    numbers, tokens = keras.Input((8,), name="numbers"), keras.Input((5,), dtype="int32", name="tokens")
    x = L.LSTM(7, return_sequences=True)(L.Embedding(9, 6, mask_zero=True)(tokens))
    x = L.Concatenate()([L.GRU(6)(L.Dense(4)(x)), L.Dense(4)(numbers)])
    kind, size = L.Dense(2, name="kind")(x), L.Dense(1, name="size")(L.Dense(5)(x))
    return keras.Model([numbers, tokens], {"kind": kind, "size": size})


def encoder():
    return keras.Sequential(
        [keras.Input((6,)), L.Dense(5, activation="tanh", name="first"), L.BatchNormalization(), L.Dense(4)],
        name="encoder",
    )


def siamese():
    shared, a, b = encoder(), keras.Input((6,)), keras.Input((6,))
    return keras.Model([a, b], L.Dense(1)(abs(shared(a) - shared(b))))


def nested():
    x = keras.Input((8,))
    y = L.Dense(6, name="inside")(x)
    inner = keras.Model(x, [y, L.Dense(4)(y)], name="inner")
    outer = keras.Input((8,))
    return keras.Model(outer, L.Dense(2)(L.Concatenate()(inner(outer * 2.0))))


class Tied(L.Layer):
    """The transposed embedding as an output layer."""

    def __init__(self, embedding):
        super().__init__(name="tied")
        self.embedding = embedding

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))


def tied():
    x, embedding = keras.Input((5,), dtype="int32"), L.Embedding(9, 6, name="embedding")
    y = Tied(embedding)(L.Dense(6, name="between")(embedding(x)))
    return keras.Model(x, L.Dense(2, name="end")(y))


def u_net():
    x = keras.Input((16, 16, 3))
    a = L.Conv2D(4, 3, padding="same", activation="relu")(x)
    b = L.Conv2D(6, 3, padding="same", activation="relu")(L.MaxPooling2D()(a))
    c = L.UpSampling2D()(L.Conv2D(6, 3, padding="same")(L.MaxPooling2D()(b)))
    d = L.Conv2DTranspose(4, 2, strides=2)(L.Concatenate()([b, c]))
    return keras.Model(x, L.Conv2D(2, 1)(L.Concatenate()([a, d])))


def frozen_start():
    x = keras.Input((8,))
    y = L.Dense(8, trainable=False)(L.Dense(8, trainable=False)(x))
    return keras.Model(x, L.Dense(2)(L.Dense(3)(y)))


class Attention(keras.Model):
    """Subclassed: one block."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm = L.MultiHeadAttention(2, 4), L.LayerNormalization()

    def call(self, x, training=None):
        return self.norm(x + self.attention(x, x, training=training))


def opaque_inside():
    x = keras.Input((6, 8))
    return keras.Model(x, L.Dense(3)(L.GlobalMaxPooling1D()(Attention()(L.Dense(8)(x)))))


def reused_activation():
    x, relu = keras.Input((8,)), L.ReLU()
    y = relu(L.Dense(8, kernel_regularizer="l2")(x))
    return keras.Model(x, L.Dense(2)(relu(L.Dense(8)(y))))


def a_layer_of_two_calls():
    x, twice = keras.Input((8,)), L.Dense(8, name="twice")
    return keras.Model(x, L.Dense(2)(twice(L.Dense(8, name="between")(twice(L.Dense(8, name="start")(x))))))


def tokens_and_numbers(rows=150, seed=0):
    rng = np.random.default_rng(seed)
    x = {"tokens": rng.integers(0, 9, (rows, 5)), "numbers": rng.normal(size=(rows, 8)).astype("float32")}
    return x, {"kind": rng.integers(0, 2, rows), "size": rng.normal(size=(rows, 1)).astype("float32")}


def compiled(model):
    loss = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    metrics = {"kind": ["accuracy"], "size": ["mae"]}
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9), loss, loss_weights={"kind": 1.0, "size": 0.5}, metrics=metrics
    )
    return model
