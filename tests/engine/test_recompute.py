"""With ``recompute`` a forward runs twice, and a stateful operation gives the second time what it gave the first."""

from __future__ import annotations

import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf

import pipetrain
from pipetrain.schemes import table

L = keras.layers
SCHEMES = ["vanilla", "weight-stashing", "vertical-sync", "spectrain", "2bw", "gpipe", "1f1b"]


def uniform(x):
    return x * tf.random.uniform(tf.shape(x))


def normal(x):
    return x + tf.random.normal(tf.shape(x))


def integers(x):
    return x * tf.cast(tf.random.uniform(tf.shape(x), 0, 3, tf.int32), x.dtype)


def shuffled(x):
    return tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[1])), axis=1)


def dropout(x):
    return tf.nn.dropout(x, 0.5)


def stateless(x):
    return tf.nn.experimental.stateless_dropout(x, 0.5, seed=[1, 2])


def in_a_branch(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: uniform(x), lambda: normal(x))


def in_a_loop(x):
    return tf.map_fn(lambda row: row * tf.random.uniform([6]), x, parallel_iterations=1)


def in_a_function(x):
    return tf.function(uniform)(x)


def in_python(x):
    drawn = tf.numpy_function(lambda like: RNG.random(like.shape).astype("float32"), [x], tf.float32)
    drawn.set_shape(x.shape)
    return x * drawn


def of_a_generator(x):
    return x * GENERATOR.uniform(tf.shape(x))


RNG, GENERATOR = np.random.default_rng(0), tf.random.Generator.from_seed(0)
DRAWS = [uniform, normal, integers, shuffled, dropout, stateless, in_a_branch, in_a_loop, in_a_function]
DRAWS += [in_python, of_a_generator]


class Drawing(L.Layer):
    def __init__(self, draw, **settings):
        super().__init__(**settings)
        self.draw = draw

    def call(self, x):
        return self.draw(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


class Counting(L.Layer):
    """Counts its calls in a variable that Keras does not know of."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.calls = tf.Variable(0.0, trainable=False)

    def call(self, x):
        return x + 0.1 * self.calls.assign_add(1.0)


def trained(layer, scheme, recompute, steps=6):
    global RNG
    keras.utils.set_random_seed(0)
    GENERATOR.reset_from_seed(0)
    RNG = np.random.default_rng(0)
    x = keras.Input((networks.FEATURES,))
    y = layer(L.Dense(6, "tanh", name="first")(x))
    model = keras.Model(x, L.Dense(networks.CLASSES, name="last")(L.Dense(6, "tanh", name="middle")(y)))
    microbatches = 2 if table.SCHEMES[scheme].splits else None
    pm = pipetrain.PipelineModel(model, cuts=("middle",), scheme=scheme, recompute=recompute, microbatches=microbatches)
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
    networks.fit(pm, *networks.data(20 * steps))
    return pm.get_weights()


def every_draw(x):
    """All of them side by side."""
    return L.Add()([Drawing(draw)(x) for draw in DRAWS])


@pytest.mark.wide
@pytest.mark.parametrize("layer", parameters.by_default([every_draw, *map(Drawing, DRAWS)], every_draw))
def test_the_backward_has_the_forwards_draws(layer):
    kept, again = (trained(layer, "1f1b", recompute) for recompute in (False, True))
    networks.assert_close(again, kept, 1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(SCHEMES, "spectrain"))
def test_in_every_scheme(scheme):
    kept, again = (trained(Drawing(of_a_generator), scheme, recompute) for recompute in (False, True))
    networks.assert_close(again, kept, 1e-6)


def test_a_forward_that_runs_again_has_the_weights_of_the_first_time():
    """While its backward reads newer ones."""
    results = []
    for recompute in (False, True):
        pm = networks.pipeline(networks.mlp(2), cuts=("d0",), scheme="vanilla", recompute=recompute)
        networks.fit(pm, *networks.data(80))
        results.append(pm.get_weights())
    networks.assert_close(*results, 1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_layer_counts_is_counted_once(recompute):
    layer = Counting()
    trained(layer, "1f1b", recompute, steps=5)
    assert float(layer.calls) == 5 * 2  # microbatches


def test_a_forward_without_state_is_traced_once():
    from pipetrain.compute.functions.stage_values import PACKED, repeatable

    spec = tf.TensorSpec([None])
    plain = tf.function(lambda x: ((x,), [2.0 * x])).get_concrete_function(spec)
    assert repeatable(plain, PACKED) is None
