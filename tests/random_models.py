"""Functional models drawn at random: branches, skips, several inputs and outputs, and what tests rarely combine."""

from __future__ import annotations

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

L = keras.layers
WIDTH, LENGTH, SIZE, WORDS = 6, 4, 5, 7  # of vectors and steps, of sequences and images, and how many words


class Fourier(L.Layer):
    """Complex numbers."""

    def call(self, x):
        return tf.signal.fft(tf.complex(x, tf.zeros_like(x)))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "complex64")


class Magnitude(L.Layer):
    def call(self, x):
        return tf.sqrt(tf.math.real(x * tf.math.conj(x)) + 1.0)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")


class Ragged(L.Layer):
    def call(self, x):
        return tf.RaggedTensor.from_tensor(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype, ragged=True)


class Dense(L.Layer):
    """A ragged tensor made dense again."""

    def call(self, x):
        return x.to_tensor()

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


class Stopped(L.Layer):
    def call(self, x):
        return tf.stop_gradient(x)


class Largest(L.Layer):
    """Whole numbers, which carry no gradient."""

    def call(self, x):
        return tf.argmax(x, axis=-1, output_type=tf.int32)


class Penalty(L.Layer):
    """Adds a loss of its own: a mean, or one for each row, which Keras adds up."""

    def __init__(self, each, **settings):
        super().__init__(**settings)
        self.each = each

    def call(self, x):
        self.add_loss(0.01 * tf.reduce_mean(tf.square(x), -1) if self.each else 0.1 * tf.reduce_mean(tf.square(x)))
        return x


def _inner(name):
    x = keras.Input((WIDTH,))
    y = L.Dense(WIDTH, "tanh", name=f"{name}_a")(x)
    return keras.Model(x, [L.Dense(WIDTH, name=f"{name}_b")(y), y], name=name)


def _words(x, name, masked=False):
    return L.Embedding(WORDS, WIDTH, mask_zero=masked, name=name)(x)


def _attended(x, name):
    return L.MultiHeadAttention(2, 3, name=name)(x, x)


def _doubled(x, name):
    return L.Dense(WIDTH, "tanh", dtype="float64", name=name)(x)


def _frozen(x, name):
    return L.Dense(WIDTH, "tanh", trainable=False, name=name)(x)


def _one_of_two(x, name):
    return L.Dense(WIDTH, name=f"{name}_joined")(L.Concatenate(name=name)(_inner(f"{name}_inner")(x)))


def _whole_numbers(x, name):
    return _words(Largest(name=name)(x), f"{name}_words")


# What makes a value of one kind from another's: name, kind of what it takes, kind of what it gives.
STEPS = {
    "dense": ("vector", "vector", lambda x, name: L.Dense(WIDTH, "tanh", name=name)(x)),
    "frozen": ("vector", "vector", _frozen),
    "double": ("vector", "vector", _doubled),
    "penalized": ("vector", "vector", lambda x, name: L.Dense(WIDTH, kernel_regularizer="l2", name=name)(x)),
    "penalty": ("vector", "vector", lambda x, name: Penalty(False, name=name)(x)),
    "penalty of rows": ("vector", "vector", lambda x, name: Penalty(True, name=name)(x)),
    "batch norm": ("vector", "vector", lambda x, name: L.BatchNormalization(name=name)(x)),
    "dropout": ("vector", "vector", lambda x, name: L.Dropout(0.4, seed=3, name=name)(x)),
    "stopped": ("vector", "vector", lambda x, name: Stopped(name=name)(x)),
    "operation": ("vector", "vector", lambda x, name: keras.ops.sin(x) - x),
    "nested": ("vector", "vector", _one_of_two),
    "fourier": ("vector", "complex", lambda x, name: Fourier(name=name)(x)),
    "magnitude": ("complex", "vector", lambda x, name: Magnitude(name=name)(x)),
    "whole numbers": ("vector", "vector", _whole_numbers),
    "repeated": ("vector", "sequence", lambda x, name: L.RepeatVector(LENGTH, name=name)(x)),
    "each": ("sequence", "sequence", lambda x, name: L.Dense(WIDTH, "tanh", name=name)(x)),
    "masking": ("sequence", "sequence", lambda x, name: L.Masking(name=name)(L.ReLU(name=f"{name}_zeros")(x))),
    "lstm": ("sequence", "sequence", lambda x, name: L.LSTM(WIDTH, return_sequences=True, name=name)(x)),
    "gru": ("sequence", "vector", lambda x, name: L.GRU(WIDTH, name=name)(x)),
    "attended": ("sequence", "sequence", _attended),
    "norm": ("sequence", "sequence", lambda x, name: L.LayerNormalization(name=name)(x)),
    "mean": ("sequence", "vector", lambda x, name: L.GlobalAveragePooling1D(name=name)(x)),
    "ragged": ("sequence", "ragged", lambda x, name: Ragged(name=name)(x)),
    "not ragged": ("ragged", "sequence", lambda x, name: Dense(name=name)(x)),
    "convolution": ("image", "image", lambda x, name: L.Conv2D(WIDTH, 2, padding="same", name=name)(x)),
    "pooled": ("image", "vector", lambda x, name: L.GlobalMaxPooling2D(name=name)(x)),
    "words": ("words", "sequence", _words),
    "masked words": ("words", "sequence", lambda x, name: _words(x, name, masked=True)),
}
MERGES = {
    "add": lambda a, b, name: L.Add(name=name)([a, b]),
    "multiply": lambda a, b, name: L.Multiply(name=name)([a, b]),
    "join": lambda a, b, name: L.Dense(WIDTH, name=f"{name}_to")(L.Concatenate(name=name)([a, b])),
}
TO_VECTORS = {"sequence": "mean", "complex": "magnitude", "ragged": "not ragged", "image": "pooled", "words": "words"}
ANY = ("vector", "vector", None)  # what merges and the shared layer take and give
ALL = [*STEPS, *MERGES, *MERGES, "shared", "shared"]
BY_ROWS = {"batch norm", "dropout"}  # what microbatches change
LOSSES = ("mse", "mae", None)


class Recipe(NamedTuple):
    """How to make a model; numbers choose among what there is, whatever their size."""

    inputs: tuple[str, ...]
    unknown: bool  # whether lengths and sizes are
    steps: tuple[tuple[int, int, int], ...]  # which of those that fit, on the values with these numbers, the newest 0
    outputs: tuple[int, ...]
    losses: tuple[str | None, ...]
    reduction: str
    cuts: tuple[int, ...]
    microbatches: int


def recipes():
    number, few = st.integers(0, 11), st.integers(0, 3)
    return st.builds(
        Recipe,
        inputs=st.lists(st.sampled_from(["vector", "sequence", "image", "words"]), min_size=1, max_size=3).map(tuple),
        unknown=st.booleans(),
        steps=st.lists(st.tuples(st.integers(0, 999), few, number), min_size=4, max_size=10).map(tuple),
        outputs=st.lists(few, min_size=1, max_size=3, unique=True).map(tuple),
        losses=st.lists(st.sampled_from(LOSSES), min_size=3, max_size=3).map(tuple),
        reduction=st.sampled_from(["sum_over_batch_size", "sum", "none"]),
        cuts=st.lists(number, min_size=1, max_size=3).map(tuple),
        microbatches=st.integers(1, 3),
    )


def build(recipe):
    """The recipe's model, the same weights every time."""
    keras.utils.set_random_seed(1)
    shapes = {"vector": (WIDTH,), "sequence": (LENGTH, WIDTH), "image": (SIZE, SIZE, WIDTH), "words": (LENGTH,)}
    inputs, values = [], []
    for n, kind in enumerate(recipe.inputs):
        shape = shapes[kind]
        if recipe.unknown and kind != "vector":
            shape = tuple(None if size in (LENGTH, SIZE) else size for size in shape)
        inputs.append(keras.Input(shape, dtype="int32" if kind == "words" else "float32", name=f"input{n}"))
        values.append((kind, inputs[-1]))
    shared = L.Dense(WIDTH, "tanh", name="shared")
    for n, (kind, (_, first, second)) in enumerate(zip(kinds(recipe), recipe.steps)):
        values.append(_made(kind, first, second, values, f"n{n}", shared))
    outputs = [_vector(values[-1 - number % len(values)], f"out{n}") for n, number in enumerate(recipe.outputs)]
    return keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0])


def kinds(recipe):
    """The recipe's steps by name: each one of those for which there is a value by then."""
    there, chosen = set(recipe.inputs), []
    for number, _, _ in recipe.steps:
        fitting = [kind for kind in ALL if STEPS.get(kind, ANY)[0] in there]
        chosen.append(fitting[number % len(fitting)])
        there.add(STEPS.get(chosen[-1], ANY)[1])
    return chosen


def _made(kind, first, second, values, name, shared):
    takes, gives, step = STEPS.get(kind, ANY)
    fitting = [value for value in values if value[0] == takes]
    a, b = (fitting[-1 - number % len(fitting)][1] for number in (first, second))
    if kind == "shared":
        return gives, shared(a)
    return gives, MERGES[kind](a, b, name) if kind in MERGES else step(a, name)


def _vector(value, name):
    """An output: a vector made by a layer, so that no two outputs are the same tensor."""
    kind, tensor = value
    while kind != "vector":
        step = TO_VECTORS[kind]
        _, kind, make = STEPS[step]
        tensor = make(tensor, f"{name}_{step.replace(' ', '_')}")
    return L.Dense(2, name=name)(tensor)


def data(recipe, rows):
    rng = np.random.default_rng(2)
    shapes = {"vector": (WIDTH,), "sequence": (LENGTH, WIDTH), "image": (SIZE, SIZE, WIDTH)}
    x = [
        rng.integers(0, WORDS, (rows, LENGTH)) if kind == "words" else rng.normal(size=(rows, *shapes[kind]))
        for kind in recipe.inputs
    ]
    y = [rng.normal(size=(rows, 2)).astype("float32") for _ in recipe.outputs]
    return [each.astype("int32" if each.dtype == np.int64 else "float32") for each in x], y


def losses(recipe):
    """A loss for every output, None for some but not for all; as ``compile`` takes them."""
    made_by = {"mse": keras.losses.MeanSquaredError, "mae": keras.losses.MeanAbsoluteError}
    chosen = [recipe.losses[n] for n in range(len(recipe.outputs))]
    if not any(chosen):
        chosen[0] = "mse"
    reduction = recipe.reduction
    if reduction == "none" and {"penalized", "penalty", "penalty of rows"}.intersection(kinds(recipe)):
        reduction = "sum"  # Keras cannot add a penalty to losses of single examples
    made = [kind and made_by[kind](reduction=reduction) for kind in chosen]
    return made if len(made) > 1 else made[0]
