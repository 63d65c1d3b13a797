"""Asynchronous schemes against the NumPy reference; synchronous ones against plain Keras."""

from __future__ import annotations

import keras
import networks
import numpy as np
import parameters
import pytest
import reference
from against_reference import ASYNCHRONOUS, BATCH, LATER, PREDICTED, compare, constantly, minibatches, plain_keras
from keras import optimizers

WIDE = [  # by default the laws have these schemes with fewer minibatches
    *(("spectrain", 1), ("spectrain", 4), ("vanilla", 2), ("weight-stashing", 4), ("vertical-sync", 3)),
    ("vertical-sync", 6),
]
HALVED = keras.optimizers.schedules.PiecewiseConstantDecay([7, 35], [0.05, 0.025, 0.1])


TRAINED = {
    "momentum": (lambda rate: optimizers.SGD(rate, momentum=0.9), 0.05, reference.Sgd()),
    "adam": (lambda rate: optimizers.Adam(rate), 2e-3, reference.Adam()),
    "lion": (lambda rate: optimizers.Lion(rate, weight_decay=0.1), 2e-3, reference.Lion(decay=0.1)),
}
AT_ONE_TARGET = [
    *[("momentum", *place) for place in ((1, 2), (4, 5))],
    ("adam", 6, 2),
    ("lion", 4, 3),
]
EXACT = [("gpipe", 4, 7), ("gpipe", 6, 1), ("1f1b", 2, 4)]


@pytest.mark.parametrize(
    ("scheme", "stages"),
    [
        *parameters.combinations(ASYNCHRONOUS, (1, 2, 3, 4, 6), default=[], wide=WIDE),
        *parameters.combinations(LATER, (2, 4, 6), default=[], wide=[(name, 4) for name in LATER]),
    ],
)
def test_asynchronous_schemes_equal_the_reference(scheme, stages):
    compare(reference.Settings(scheme, constantly(0.05)), stages, optimizers.SGD(0.05, momentum=0.9))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "stages", "microbatches"),
    parameters.combinations([*TRAINED], (1, 2, 3, 4, 6), (1, 2, 3, 5), default=AT_ONE_TARGET),
)
def test_one_target_equals_the_reference(name, stages, microbatches):
    optimizer, rate, expected = TRAINED[name]
    settings = reference.Settings("target", constantly(rate), expected, microbatches=microbatches)
    compare(settings, stages, optimizer(rate))


@pytest.mark.parametrize(
    ("name", "stages", "horizon"),
    parameters.combinations(
        [*TRAINED], (1, 2, 3, 4, 6), (1.5, 1), default=[], wide=[("momentum", 4, 1.5), ("lion", 3, 1)]
    ),
)
def test_two_predicted_versions_equal_the_reference(name, stages, horizon):
    optimizer, rate, expected = TRAINED[name]
    settings = reference.Settings("2bw", constantly(rate), expected, horizon=horizon)
    compare(settings, stages, optimizer(rate), microbatches=max(5, stages))


@pytest.mark.wide
@pytest.mark.parametrize("microbatches", parameters.by_default([1, 3], 3))
def test_one_target_without_a_longer_momentum(microbatches):
    """Predictions then reach less far."""
    settings = reference.Settings("target", constantly(0.02), microbatches=microbatches)
    compare(settings, 4, optimizers.SGD(0.02, momentum=0.9), stretch_momentum=False)


@pytest.mark.parametrize(
    "name", parameters.by_default(["nesterov", "decay", "adamw", "nadam", "rmsprop momentum"], wide=["decay", "nadam"])
)
def test_longer_momenta_at_changing_rates(name):
    """A schedule reaches every stage, multiplied where momentum sums; decoupled weight decay stays what it is."""
    optimizer, expected = {**PREDICTED, "nadam": (lambda rate: optimizers.Nadam(rate), reference.Nadam())}[name]
    scale = 1.0 if name in ("nesterov", "decay") else 0.05
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([7, 35], [scale * each for each in HALVED.values])
    settings = reference.Settings("target", lambda t: float(schedule(t)), expected, microbatches=2)
    compare(settings, 4, optimizer(schedule))


@pytest.mark.wide
@pytest.mark.parametrize("name", parameters.by_default(PREDICTED, "nesterov", "adamw"))
def test_predictions_of_every_optimizer_at_changing_rates(name):
    """The rate changes between two steps of a fit: predictions go by that of the last step."""
    optimizer, expected = PREDICTED[name]
    rates, scale = HALVED, 1.0 if name in ("plain", "momentum", "nesterov", "decay") else 0.05
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([7, 35], [scale * each for each in rates.values])
    settings = reference.Settings("spectrain", lambda t: float(schedule(t)), expected)
    compare(settings, 4, optimizer(schedule))


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(["local", "fitted"], "fitted"))
def test_horizons_with_adamw(scheme):
    settings = reference.Settings(scheme, constantly(2e-3), reference.Adam(decay=0.1))
    compare(settings, 4, optimizers.AdamW(2e-3, weight_decay=0.1))


@pytest.mark.wide
@pytest.mark.parametrize(
    "scheme",
    parameters.by_default(["weight-stashing", "vertical-sync", "spectrain", "2bw"], "spectrain", wide=["2bw"]),
)
def test_corrections_equal_the_reference(scheme):
    """Spike compensation and rescaled rates, both at once where a scheme has both."""
    steps = None if scheme == "2bw" else 40
    settings = reference.Settings(scheme, constantly(0.02), reference.Sgd(), True, steps or 0)
    compare(settings, 4, optimizers.SGD(0.02, momentum=0.9), spike_compensation=True, rescale_steps=steps)


@pytest.mark.wide
def test_rescaled_rates_of_a_schedule_and_another_optimizer():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([7, 35], [2e-3, 1e-3, 4e-3])
    settings = reference.Settings("spectrain", lambda t: float(schedule(t)), reference.Adam(), rescale_steps=40)
    compare(settings, 4, optimizers.Adam(schedule), rescale_steps=40)


@pytest.mark.wide
@pytest.mark.parametrize("microbatches", parameters.by_default([5, 8], 5))
def test_2bw_of_any_number_of_microbatches(microbatches):
    """Batches of 16 rows, and a short one in the midst, of fewer rows than microbatches."""
    x, y = networks.data(rows=12 * BATCH)
    model = networks.mlp()
    state = reference.State([tuple(layer.get_weights()) for layer in model.layers])
    pm = networks.pipeline(model, scheme="2bw", cuts=networks.cuts(6, 6), microbatches=microbatches)
    batches = minibatches(x, y)
    batches[4] = (batches[4][0][:3], batches[4][1][:3])
    pm.fit((batch for batch in batches), steps_per_epoch=len(batches), verbose=0)
    reference.train(reference.Settings("2bw", constantly(0.05)), state, networks.ends(6, 6), batches)
    networks.assert_close(model.get_weights(), [array for layer in state.layers for array in layer])


@pytest.mark.wide
@pytest.mark.parametrize("epochs", [3])
def test_an_epoch_is_a_drain(epochs):
    x, y = networks.data(rows=10 * BATCH)
    pm = networks.pipeline(networks.mlp())
    first = pm.get_weights()
    pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=epochs)
    once = pm.get_weights()
    networks.begin_anew(pm, first)
    for _ in range(epochs):
        pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    networks.assert_equal(pm.get_weights(), once)


@pytest.mark.parametrize(
    ("scheme", "stages", "microbatches"),
    [
        *parameters.combinations(["gpipe", "1f1b"], [1, 2, 4, 6], [1, 4, 7], default=[], wide=EXACT),
        *parameters.combinations(["gpipe", "1f1b"], [1, 2, 4, 6], [3], default=[]),  # as uneven as 7
    ],
)
def test_synchronous_schemes_equal_plain_keras(scheme, stages, microbatches):
    x, y = networks.data(rows=5 * BATCH + 9)  # the last batch is short
    model, (weights, expected) = networks.mlp(), plain_keras(len(x))
    pm = networks.pipeline(model, scheme=scheme, cuts=networks.cuts(6, stages), microbatches=microbatches)
    history = pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2)
    networks.assert_close(model.get_weights(), weights)
    for name, values in expected.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5)
