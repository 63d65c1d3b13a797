"""Workers that update weights of their own, and join them after so many steps."""

from __future__ import annotations

import keras
import networks
import numpy as np
import pytest
from checkpointed import STEPS
from checkpointed import run as checkpointed
from transfer_models import convolutional, words

import pipetrain
from pipetrain.schemes.synchrony import LocalSGD
from pipetrain.schemes.transfers.plan import Pack, Phase, Plan

DEVICES = ("CPU:0", "CPU:1", "CPU:2")
DATA = networks.data(70)


def trained(synchrony=None, data=DATA, make=networks.small, optimizer=None, devices=DEVICES, rows=20, **settings):
    """Two epochs, whose last minibatch is short."""
    keras.utils.set_random_seed(0)
    settings = {"order": "none", "synchrony": synchrony, "devices": devices, "stages": None, **settings}
    pm = networks.pipeline(make(), optimizer, scheme="all-reduce", **settings)
    networks.fit(pm, *data, epochs=2, batch_size=rows)
    return pm.get_weights()


def test_weights_are_those_of_a_straight_line_of_numpy():
    """A layer without a bias, two devices, the mean squared error, SGD, joined after two steps of six in an epoch."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 8)).astype("float32"), rng.normal(size=(48, 4)).astype("float32")
    layer = keras.layers.Dense(4, use_bias=False)
    model = keras.Sequential([keras.Input((8,)), layer])
    before, rate = layer.get_weights()[0].astype(np.float64), 0.1
    options = LocalSGD(steps=2, rate=0.7, momentum=0.5)
    way = pipetrain.AllReduce(order="none", synchrony=options)
    pm = pipetrain.PipelineModel(model, scheme=way, devices=DEVICES[:2])
    pm.compile(keras.optimizers.SGD(rate), "mse")
    pm.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    own, momentum = [before, before], 0.0
    for step, first in enumerate([*range(0, 48, 8)] * 2):
        for worker in range(2):
            rows = slice(first + 4 * worker, first + 4 * worker + 4)
            own[worker] = own[worker] - rate * x[rows].T @ (x[rows] @ own[worker] - y[rows]) * 2 / (4 * 4)
        if step % 2:
            moved = before - sum(own) / 2
            momentum = 0.5 * momentum + moved
            before = before - 0.7 * (moved + 0.5 * momentum)
            own = [before, before]
    np.testing.assert_allclose(layer.get_weights()[0], before, rtol=1e-4, atol=1e-6)


def test_an_average_after_every_step_is_no_other_training():
    whole = trained()
    networks.assert_equal(trained("local:1"), whole)
    equal = {"data": networks.data(60), "optimizer": keras.optimizers.SGD(0.05), "rows": 15}  # five for each worker
    barely = trained(LocalSGD(steps=1, rate=1 - 1e-7), **equal)
    networks.assert_close(barely, trained(**{**equal, "optimizer": keras.optimizers.SGD(0.05)}))


def test_one_worker_trains_as_plain_keras():
    single = networks.compiled("keras")
    networks.fit(single, *DATA, epochs=2)
    networks.assert_close(trained("local:2", devices=DEVICES[:1]), single.get_weights(), 1e-4)


@pytest.mark.parametrize("make", [networks.small, pytest.param(convolutional, marks=pytest.mark.wide)])
def test_weights_do_not_depend_on_the_order(make):
    data = DATA
    if make is convolutional:
        rng = np.random.default_rng(0)
        data = rng.normal(size=(70, *make().input_shape[1:])).astype("float32"), np.arange(70) % 5
    whole = trained("local:3", data, make)
    networks.assert_equal(trained("local:3", data, make, order="caramel"), whole)


def test_rows_of_embeddings_are_updated_by_each_worker():
    data = np.arange(60 * 6).reshape(60, 6) % 20, np.arange(60) % 5
    weights = trained(LocalSGD(steps=1, rate=1 - 1e-7), data, words, keras.optimizers.SGD(0.05), rows=15)
    networks.assert_close(weights, trained(None, data, words, keras.optimizers.SGD(0.05), rows=15))


@pytest.mark.parametrize("compression", [None, "int4"])
def test_a_run_that_is_stopped_goes_on_bitwise(compression, tmp_path):
    synchrony = LocalSGD(steps=2, rate=0.7, momentum=0.9)
    way = {"scheme": "all-reduce", "devices": DEVICES, "order": "none", "synchrony": synchrony}
    way["compression"] = compression
    whole, _ = checkpointed(tmp_path / "whole", **way)
    _, history = checkpointed(tmp_path / "stopped", stop_after=STEPS + 3, **way)
    assert history is None
    again, _ = checkpointed(tmp_path / "stopped", **way)
    networks.assert_equal(again.get_weights(), whole.get_weights())


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Only all-reduce"):
        networks.in_way(networks.small(), scheme="parameter-server", synchrony="local:2")
    with pytest.raises(ValueError, match="Unknown synchrony"):
        pipetrain.AllReduce(synchrony="stale")
    for wrong in ({"steps": 0}, {"rate": 0}, {"momentum": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LocalSGD(**wrong)
    late = Plan(Phase(), Phase((Pack((0, 1, 2, 3), 4),)), Phase((Pack((4, 5), 4),)))
    with pytest.raises(ValueError, match="nothing late"):
        trained("local:2", order=late)
