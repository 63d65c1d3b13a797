"""Predicted weights against those that the optimizer then reaches, for every optimizer."""

from __future__ import annotations

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from keras import optimizers

from pipetrain.compute.optimizer.clone import clone
from pipetrain.compute.optimizer.update import Update
from pipetrain.schemes.scheme import UpdateRule

STEADY = {
    "plain": lambda: optimizers.SGD(0.01),
    "plain decay": lambda: optimizers.SGD(0.01, weight_decay=0.5),
    "momentum": lambda: optimizers.SGD(0.01, momentum=0.9),
    "momentum decay": lambda: optimizers.SGD(0.01, momentum=0.9, weight_decay=0.5),
    "nesterov": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "nesterov decay": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True, weight_decay=0.5),
    "clipped": lambda: optimizers.SGD(0.01, momentum=0.9, clipnorm=0.1),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adam decay": lambda: optimizers.Adam(0.01, weight_decay=0.5),
    "adamw": lambda: optimizers.AdamW(0.01),
    "adamw decay": lambda: optimizers.AdamW(0.01, weight_decay=0.5),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "rmsprop momentum": lambda: optimizers.RMSprop(0.01, momentum=0.9),
    "rmsprop centered": lambda: optimizers.RMSprop(0.01, centered=True, epsilon=1e-2),
    "rmsprop decay": lambda: optimizers.RMSprop(0.01, weight_decay=0.5),
}
WITHOUT_DECAY = [name for name in STEADY if "decay" not in name]
OTHERS = ("Nadam", "Lion", "Adagrad", "Adamax", "Ftrl", "Adafactor", "Lamb", "Muon")  # without a formula
GRADIENTS = [np.float32([[0.3, -0.2], [0.1, 0.7]]), np.float32([-0.4, 0.5])]


def stepper(optimizer, rule):
    """An update of two variables, of which the second is left out of weight decay, and its steps as functions."""
    variables = [keras.Variable(np.float32([[1.0, -2.0], [0.5, 3.0]])), keras.Variable(np.float32([1.0, -1.0]))]
    optimizer.exclude_from_weight_decay([variables[1]])
    mine = clone(optimizer, variables, variables, rule)
    mine.build(variables)
    update = Update(mine, variables, rule)
    step = tf.function(lambda gradients, staleness: update.apply(gradients, staleness), autograph=False)
    return variables, mine, update, lambda stale=0.0: step([tf.constant(g) for g in GRADIENTS], tf.constant(stale))


def values(variables):
    return [keras.ops.convert_to_numpy(variable).copy() for variable in variables]


@pytest.mark.parametrize(
    "name", parameters.by_default(STEADY, *WITHOUT_DECAY, "plain decay", "nesterov decay", wide=STEADY)
)
def test_a_constant_gradient_at_steady_momentum_is_predicted(name):
    variables, _, update, step = stepper(STEADY[name](), UpdateRule(predicts=True))
    for _ in range(400):
        step()
    predicted = [update.predicted(tf.constant(float(ahead))) for ahead in range(8)]
    for expected in predicted:
        for now, then in zip(values(variables), expected):
            np.testing.assert_allclose(now, then, rtol=2e-6, atol=1e-6)
        step()


def test_of_accumulated_gradients_the_minibatches_since_the_last_update_count():
    """With every third one an update is made; equal gradients make equal updates."""
    variables, _, update, step = stepper(optimizers.SGD(0.01, gradient_accumulation_steps=3), UpdateRule(predicts=True))
    for _ in range(6):
        step()
    reached, predicted = [], []
    for _ in range(9):
        reached.append(values(variables))
        predicted.append([update.predicted(tf.constant(float(ahead))) for ahead in range(5)])
        step()
    for n, each in enumerate(predicted):
        for expected, then in zip(each, reached[n:]):
            for one, other in zip(expected, then):
                np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("name", [*STEADY, *OTHERS])
def test_the_velocity_is_the_update_last_made_whatever_its_rate(name):
    """One ahead is as far again as the last step went, also just before a new learning rate takes effect."""
    make = STEADY[name] if name in STEADY else lambda: getattr(optimizers, name)(0.01, weight_decay=0.5)
    variables, optimizer, update, step = stepper(make(), UpdateRule(predicts=True))
    for now, then in zip(values(variables), update.predicted(tf.constant(5.0))):
        np.testing.assert_array_equal(now, then)  # nothing is known yet
    for rate in (0.01, 0.001, 0.05):
        optimizer.learning_rate = rate
        before, _ = values(variables), step()
        optimizer.learning_rate = 1.0
        for n, (old, now, velocity) in enumerate(zip(before, values(variables), update.velocity())):
            decay = (optimizer.weight_decay or 0.0) * rate if n == 0 else 0.0
            np.testing.assert_allclose(velocity, now - (1 - decay) * old, rtol=1e-4, atol=1e-6)


def test_compensated_spikes_at_steady_momentum_are_predicted():
    variables, _, update, step = stepper(optimizers.SGD(0.01, momentum=0.9), UpdateRule(predicts=True, spikes=True))
    for _ in range(200):
        step(3.0)
    expected = update.predicted(tf.constant(4.0))
    for _ in range(4):
        step(3.0)
    networks.assert_close(values(variables), expected, 1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [optimizers.Adam(), optimizers.SGD(0.1), optimizers.SGD(0.1, 0.9, nesterov=True), optimizers.RMSprop(0.1)],
)
def test_spike_compensation_is_for_momentum(optimizer):
    with pytest.raises(ValueError, match=r"Spike compensation is for SGD with momentum. Received: optimizer="):
        networks.pipeline(optimizer=optimizer, scheme="spike-compensation")


def test_too_few_microbatches_for_two_versions():
    with pytest.raises(ValueError, match=r"microbatches=2, 4 stages. Try microbatches=4"):
        networks.pipeline(scheme="2bw", cuts=networks.cuts(6, 4), microbatches=2)
    assert inside.microbatches(networks.pipeline(scheme="2bw", cuts=networks.cuts(6, 6))) == 6


@pytest.mark.wide
@pytest.mark.parametrize("horizon", parameters.by_default(["local", "fitted"], "fitted"))
def test_horizons_hold_with_replicas_and_recomputation(horizon):
    """Both at once, against neither."""
    x, y = networks.data(12 * 16)
    weights = []
    for options in ({}, {"replicas": (1, 2, 1), "recompute": True}):
        model = networks.mlp()
        pm = networks.pipeline(model, cuts=networks.cuts(6, 3), horizon=horizon, **options)
        pm.fit(x, y, batch_size=16, shuffle=False, epochs=2, verbose=0)
        weights.append(model.get_weights())
    networks.assert_close(*weights)
