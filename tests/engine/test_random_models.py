"""Random models, cut at random, learn as plain Keras has them learn."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import random_models
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

import pipetrain
from pipetrain.compute.graph.blocks import Chain

ROWS, STEPS, RATE = 8, 10, 0.02


def compiled(model, recipe, **how):
    rate = RATE if recipe.reduction == "sum_over_batch_size" else RATE / ROWS
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), random_models.losses(recipe), **how)
    return model


def pipeline(recipe):
    model = random_models.build(recipe)
    names = [block.name for block in Chain(model).blocks]
    ends = sorted({number % len(names) for number in recipe.cuts} - {len(names) - 1})
    by_rows = random_models.BY_ROWS.intersection(random_models.kinds(recipe))
    pm = pipetrain.PipelineModel(
        model,
        cuts=[names[end] for end in ends],
        scheme="1f1b",
        microbatches=1 if by_rows else recipe.microbatches,
    )
    return compiled(pm, recipe)


def first_step(model, x, y):
    """The loss of one step, and the gradients that it went by; None where no gradient reaches any weight."""
    before = model.get_weights()
    try:
        loss = model.train_on_batch([each[:ROWS] for each in x], [each[:ROWS] for each in y])
    except ValueError as error:
        assert "radient" in str(error)
        return None
    rate = float(model.optimizer.learning_rate)
    return loss, [(old - new) / rate for old, new in zip(before, model.get_weights())]


def assert_near(got, want, what, rounding=0.0):
    """To 1e-5 of the largest element, and so much more as the rounding of what they were computed from."""
    assert len(got) == len(want)
    largest = max([1.0, *(np.abs(each).max() for each in want if each.size)])
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * largest + rounding, err_msg=what)


def check(recipe):
    x, y = random_models.data(recipe, ROWS * STEPS)
    plain, pm = compiled(random_models.build(recipe), recipe, run_eagerly=True), pipeline(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights without a gradient
        expected, got = (first_step(each, x, y) for each in (plain, pm))
        assert (got is None) == (expected is None)
        if expected is None:
            return
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
        weights_eps = np.finfo("float32").eps * max(np.abs(each).max() for each in plain.get_weights())
        assert_near(got[1], expected[1], "gradients", rounding=weights_eps / float(plain.optimizer.learning_rate))
        rest = [each[ROWS:] for each in x], [each[ROWS:] for each in y]
        expected = plain.fit(*rest, batch_size=ROWS, shuffle=False, verbose=0).history["loss"]
        assume(np.isfinite(expected).all())
        got = pm.fit(*rest, batch_size=ROWS, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert_near(pm.get_weights(), plain.get_weights(), "weights after ten steps")


how = {
    "deadline": None,
    "database": None,
    "phases": (Phase.explicit, Phase.generate),  # a model takes seconds, and shrinking one hundreds of models
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.wide
@seed(1973)
@settings(max_examples=2, **how)
@given(random_models.recipes())
def test_two_random_models_learn_as_in_plain_keras(recipe):
    check(recipe)


@pytest.mark.slow
@seed(1973)
@settings(max_examples=8, **how)
@given(random_models.recipes())
def test_eight_random_models_learn_as_in_plain_keras(recipe):
    check(recipe)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@seed(0)
@settings(max_examples=200, **how)
@given(random_models.recipes())
def test_two_hundred_random_models_learn_as_in_plain_keras(recipe):
    check(recipe)
