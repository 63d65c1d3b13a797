"""State that is in none of Keras' lists of a model's variables: recurrent states, and the global seed."""

from __future__ import annotations

from functools import cache

import inside
import keras
import networks
import numpy as np
import parameters
import pytest

from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.compute.keras_private import global_seed

L = keras.layers
ROWS, STEPS = 6, 4


def of_words(*layers, rows=ROWS, seed=0):
    """A model of sequences with a fixed batch, and data for it."""
    keras.utils.set_random_seed(seed)
    x = inputs = keras.Input(batch_shape=(rows, 3, 2))
    for layer in layers:
        x = layer()(x)
    return keras.Model(inputs, L.Dense(2)(x))


def recurrent():
    return of_words(
        lambda: L.Bidirectional(L.GRU(3, stateful=True, return_sequences=True)),
        lambda: L.LSTM(4, stateful=True),
    )


def simple():
    return of_words(lambda: L.SimpleRNN(4, stateful=True, return_sequences=True), lambda: L.SimpleRNN(3, stateful=True))


def states(model):
    """The states of all stateful layers, those inside others too."""
    layers = [each for layer in model.layers for each in layer._flatten_layers()]
    layers = [each for each in layers if isinstance(each, L.RNN)]
    return [np.array(state) for layer in layers for state in keras.tree.flatten(layer.states)]


def data(steps=STEPS):
    return networks.normal(steps * ROWS, 3, 2), networks.normal(steps * ROWS, 2)


def compiled(model, jit_compile=False, rate=0.1, **settings):
    trained = networks.in_way(model, **settings) if settings else model
    trained.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", jit_compile=jit_compile)
    return trained


def fit(trained, x, y, epochs=1, **settings):
    return trained.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, epochs=epochs, **settings)


def trained_with_resets(model, **settings):
    """Two fits with the states set to zero between them, an evaluation and a prediction."""
    trained, (x, y) = compiled(model, **settings), data()
    fit(trained, x, y, validation_data=(x[:ROWS], y[:ROWS]), validation_batch_size=ROWS)
    for layer in model.layers[1:3]:
        layer.reset_state() if hasattr(layer, "reset_state") else layer.reset_states()
    fit(trained, x, y)
    loss = trained.evaluate(x, y, batch_size=ROWS, verbose=0)
    return [*model.get_weights(), *states(model), np.array(loss), trained.predict(x, batch_size=ROWS, verbose=0)]


@cache
def of_plain_keras():
    """What plain Keras makes of the same, the same for every scheme that is compared with it."""
    return trained_with_resets(recurrent())


@pytest.mark.wide
@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "1f1b", "microbatches": 4, "recompute": True},
        pytest.param({"scheme": "gpipe", "microbatches": 1}, marks=pytest.mark.slow),
        pytest.param(
            {"scheme": "1f1b", "microbatches": 2, "replicas": (1, 2), "jit_compile": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_recurrent_states_go_on_as_in_plain_keras(settings):
    """Each microbatch, and each replica, has its rows of them."""
    model = recurrent()
    networks.assert_close(trained_with_resets(model, cuts=(model.layers[1].name,), **settings), of_plain_keras())
    assert min(abs(state).max() for state in states(model)) > 0.01


@pytest.mark.wide
def test_asynchronous_stages_read_the_state_of_the_forward_before():
    """At a rate of zero all versions of the weights are equal, and so are the states with Keras'."""
    found = []
    for settings in ({}, {"scheme": "vanilla"}):
        model, (x, y) = simple(), data()
        settings |= {"cuts": (model.layers[1].name,)} if settings else {}
        trained = compiled(model, rate=0.0, **settings)
        fit(trained, x, y)
        found.append(states(model))
    networks.assert_close(*found)


@pytest.mark.wide
def test_a_batch_of_other_rows_than_the_states_is_refused():
    model, (x, y) = simple(), data()
    pm = compiled(model, scheme="1f1b", microbatches=1, stages=2, cuts=(model.layers[1].name,))
    with pytest.raises(ValueError, match=r"remembers 6 rows.*batch of 1 rows. Try batch_size=6"):
        fit(pm, x[:7], y[:7])


class Noise(L.Layer):
    """Draws where no seed is given, in training."""

    def call(self, x, training=False):
        return x + keras.random.normal(keras.ops.shape(x)) if training else x


def noisy(*places, depth=4):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,))])
    for n in range(depth):
        model.add(L.Dense(4, name=f"d{n}"))
        if n in places:
            model.add(Noise(name=f"noise{n}"))
    return model


def train_noisy(model, epochs=1, callbacks=(), **settings):
    """The weights after a fit that begins at the same global seed, and where the global seed is then."""
    keras.utils.set_random_seed(5)
    trained = compiled(model, rate=0.01, **settings)
    x, y = networks.normal(24, 4), networks.normal(24, 4)
    fit(trained, x, y, epochs=epochs, callbacks=[*callbacks])
    return [*model.get_weights(), np.array(global_seed())]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("place", "recompute", "jit_compile"),
    [
        (2, True, False),
        *parameters.rarely((0, False, False), (2, False, True)),
    ],
)
def test_one_layer_that_draws_from_the_global_seed_is_as_in_plain_keras(place, recompute, jit_compile):
    """Whichever stage it is in; and the seed is then where Keras leaves it."""
    expected = train_noisy(noisy(place), epochs=2, jit_compile=jit_compile)
    how = {"cuts": ("d1",), "scheme": "1f1b", "microbatches": 1, "recompute": recompute, "jit_compile": jit_compile}
    got = train_noisy(noisy(place), epochs=2, **how)
    networks.assert_close(got[:-1], expected[:-1])
    networks.assert_equal(got[-1], expected[-1])


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(["spectrain", "gpipe"], "spectrain"))
def test_stages_that_draw_from_the_global_seed_have_streams_of_their_own(scheme, tmp_path):
    """The same seed gives the same weights, with recomputation and in a run that was interrupted."""
    cuts = {"cuts": ("d1",), "scheme": scheme}
    weights = train_noisy(noisy(0, 2), epochs=2, **cuts)
    networks.assert_equal(train_noisy(noisy(0, 2), epochs=2, **cuts), weights)
    if scheme == "gpipe":
        networks.assert_equal(train_noisy(noisy(0, 2), epochs=2, **cuts, recompute=True), weights)
    train_noisy(noisy(0, 2), callbacks=[PipelineCheckpoint(tmp_path, every_steps=4)], **cuts)
    resumed = train_noisy(noisy(0, 2), epochs=2, callbacks=[PipelineCheckpoint(tmp_path, every_steps=4)], **cuts)
    networks.assert_equal(resumed, weights)
    once = train_noisy(noisy(0, 2), **cuts)
    assert not np.array_equal(once[-1], weights[-1])


def test_stages_draw_different_numbers():
    model = noisy(0, 2)
    pm = compiled(model, cuts=("d1",), scheme="gpipe", microbatches=1)
    fit(pm, networks.normal(6, 4), networks.normal(6, 4))
    seeds = [stage._state.values[-1].numpy() for stage in inside.stages(pm).first]
    assert seeds[0][0] != seeds[1][0]


@pytest.mark.wide
def test_recurrent_states_and_their_place_survive_a_resumption(tmp_path):
    found = []
    for epochs, kept in ((2, None), (1, tmp_path), (2, tmp_path)):
        model, (x, y) = simple(), data()
        pm = compiled(model, cuts=(model.layers[1].name,), scheme="gpipe", microbatches=2)
        fit(pm, x, y, epochs=epochs, callbacks=[PipelineCheckpoint(kept, every_steps=4)] if kept else [])
        found.append([*model.get_weights(), *states(model)])
    networks.assert_equal(found[2], found[0])
