"""Every way comes to what plain Keras comes to, or to what its rule says, and always to the same."""

from __future__ import annotations

import inside
import keras
import networks
import numpy as np
import pytest
import ways_to_train
from ways_to_train import (
    BATCH,
    EACH_MECHANISM,
    MOST,
    WAYS,
    WITH_LATE,
    X,
    Y,
    anew,
    assert_bitwise,
    assert_came_to,
    expected,
    fit,
    outcome,
    over,
)

from pipetrain.callbacks import Snapshots
from pipetrain.schemes.table import EVERY_NAME


def test_laws_go_over_every_scheme():
    assert set(EVERY_NAME) <= {name.partition(",")[0] for name in WAYS}


@over(*WAYS, default=MOST, wide=WAYS)
def test_weights_losses_metrics_and_evaluation_are_those_of_the_unsplit_model_or_of_the_rule(way):
    assert_came_to(ways_to_train.undisturbed(way), expected(way))


@pytest.mark.wide
@pytest.mark.parametrize("way", ["auto"])
def test_what_is_chosen_by_itself_trains_as_plain_keras(way):
    assert_came_to(ways_to_train.undisturbed(way), expected(way))


@over(default=("all-reduce",), wide=EACH_MECHANISM)
def test_a_minibatch_of_one_row_is_trained_on(way):
    """Fewer rows than there are microbatches, replicas, or devices with rows of their own."""
    assert_came_to(outcome(anew(way), rows=BATCH * 2 + 1), expected(way, BATCH * 2 + 1))


@over(default=("spectrain",), wide=EACH_MECHANISM)
def test_the_same_seed_gives_the_same_bits(way):
    def shuffled():
        pm = anew(way)
        keras.utils.set_random_seed(0)
        return outcome(pm, shuffle=True)

    first, second = shuffled(), shuffled()
    assert_bitwise(first, second)
    assert (first.weights[0] != ways_to_train.undisturbed(way).weights[0]).any()


@over(*ways_to_train.pipelines(), default=("spectrain",), wide=EACH_MECHANISM)
def test_delays_change_no_bit(way, monkeypatch):
    want = ways_to_train.undisturbed(way)
    pm = anew(way)
    with monkeypatch.context() as patch:
        networks.delay(patch, 0.01, "forward", "backward", "input_gradients", "update")
        inside.forget_functions(pm)
        assert_bitwise(outcome(pm), want)
    inside.forget_functions(pm)


@over(default=("spectrain",), wide=EACH_MECHANISM)
def test_evaluation_prediction_and_files_are_those_of_the_unsplit_model_with_the_same_weights(way, tmp_path):
    pm, single = anew(way), ways_to_train.compiled(ways_to_train.network(WAYS[way]), WAYS[way])
    fit(pm)
    weights = pm.get_weights()
    single.set_weights(weights)
    settings = {"batch_size": 20, "verbose": 0}
    np.testing.assert_allclose(pm.evaluate(X, Y, **settings), single.evaluate(X, Y, **settings), rtol=1e-5)
    predicted = single.predict(X, **settings)
    np.testing.assert_allclose(pm.predict(X, **settings), predicted, atol=1e-6)
    pm.save(tmp_path / "model.keras")
    pm.save_weights(tmp_path / "only.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    networks.assert_equal(loaded.get_weights(), weights)
    np.testing.assert_allclose(loaded.predict(X, **settings), predicted, atol=1e-6)
    anew(way).load_weights(tmp_path / "only.weights.h5")
    networks.assert_equal(pm.get_weights(), weights)
    np.testing.assert_allclose(pm.predict(X, **settings), predicted, atol=1e-6)


@over(default=("spectrain",), wide=(*WITH_LATE, "spectrain, fitted"))  # which trains by threads
def test_a_snapshot_has_the_weights_of_its_step(way):
    """Those of training that ends there: what else is under way has no part in them."""
    kept = {}
    whole = anew(way)
    fit(whole, epochs=2, callbacks=[Snapshots(3, lambda step, model: kept.update({step: model.get_weights()}))])
    assert sorted(kept) == [3, 6, 9, 12]
    for step, weights in [*kept.items()][:2]:
        pm = anew(way)
        fit(pm, step * BATCH)
        networks.assert_equal(weights, pm.get_weights())
