"""Gradients that are sent and applied while the next step computes."""

from __future__ import annotations

import keras
import networks
import numpy as np
import parameters
import pytest
from checkpointed import assert_goes_on_bitwise
from transfer_models import words

import pipetrain
from pipetrain.compute.transfers.step import TransferStep
from pipetrain.schemes.synchrony import Stale, synchrony_of
from pipetrain.schemes.transfers.plan import Pack, Phase, Plan

DEVICES = ("CPU:0", "CPU:1", "CPU:2")
DATA = networks.data(70)
WAYS = (("all-reduce", "none"), ("parameter-server", "none"), ("parameter-server", "push-pull"))


def trained(
    scheme="all-reduce", order="none", synchrony="stale:1", data=DATA, make=networks.small, rows=20, **settings
):
    """Two epochs, whose last minibatch is short."""
    keras.utils.set_random_seed(0)
    settings = {"devices": DEVICES, "stages": None, "order": order, "synchrony": synchrony, **settings}
    rows, optimizer = settings.pop("rows", 20), settings.pop("optimizer", None)
    pm = networks.pipeline(make(), optimizer, scheme=scheme, **settings)
    networks.fit(pm, *data, epochs=2, batch_size=rows)
    return pm.get_weights()


@pytest.mark.parametrize(("scheme", "order"), WAYS)
def test_weights_are_those_of_a_straight_line_of_numpy(scheme, order):
    """A layer without a bias, three devices, the mean squared error, SGD with momentum, six steps in an epoch."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(36, 8)).astype("float32"), rng.normal(size=(36, 4)).astype("float32")
    layer = keras.layers.Dense(4, use_bias=False)
    model = keras.Sequential([keras.Input((8,)), layer])
    weights, velocity, rate = layer.get_weights()[0].astype(np.float64), 0.0, 0.1
    pm = networks.in_way(model, scheme=scheme, order=order, synchrony="stale", devices=DEVICES)
    pm.compile(keras.optimizers.SGD(rate, momentum=0.5), "mse")
    pm.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    for _ in range(2):
        waiting = None
        for first in (*range(0, 36, 6), None):
            rows = slice(first, (first or 0) + 6)
            made = None if first is None else x[rows].T @ (x[rows] @ weights - y[rows]) * 2 / (6 * 4)
            if waiting is not None:
                velocity = 0.5 * velocity - rate * waiting
                weights = weights + velocity
            waiting = made
    np.testing.assert_allclose(layer.get_weights()[0], weights, rtol=1e-4, atol=1e-6)
    assert [*pm.staleness] == [1]


def test_a_bound_of_none_is_synchronous():
    assert synchrony_of("stale:0") is None and synchrony_of(Stale(0)) is None
    networks.assert_equal(trained(synchrony="stale:0"), trained(synchrony=None))


@pytest.mark.wide
def test_weights_depend_neither_on_the_scheme_nor_on_the_order():
    whole = trained()
    for scheme, order in (*WAYS[1:], ("all-reduce", "caramel"), ("all-reduce", "layerwise")):
        networks.assert_equal(trained(scheme, order), whole)
    networks.assert_close(trained(topology="ring"), whole)
    assert any((mine != synchronous).any() for mine, synchronous in zip(whole, trained(synchrony=None), strict=True))


@pytest.mark.wide
def test_snapshots_are_drains_for_both_schemes_alike():
    found = []
    for scheme, order in WAYS:
        keras.utils.set_random_seed(0)
        pm = networks.in_way(networks.small(), scheme=scheme, order=order, synchrony="stale:1", devices=DEVICES)
        pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
        looks = [pipetrain.callbacks.Snapshots(2, lambda *given: None)]
        pm.fit(*DATA, batch_size=14, epochs=2, shuffle=False, verbose=0, callbacks=looks)
        found.append(pm.get_weights())
    for other in found[1:]:
        networks.assert_close(other, found[0])


class Bounded(keras.layers.Layer):
    """Assigns to its trained weight, as spectral normalization does."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        self.scale.assign(keras.ops.clip(self.scale, -3.0, 3.0))
        return x * self.scale


def test_what_would_replace_an_update_is_refused():
    for synchrony in ("stale:1", "asynchronous"):
        model = keras.Sequential([keras.Input((networks.FEATURES,)), Bounded(), keras.layers.Dense(networks.CLASSES)])
        with pytest.raises(ValueError, match=rf"synchrony='{synchrony}', with assignments to .*scale.*Try leaving"):
            trained("parameter-server", synchrony=synchrony, make=lambda model=model: model)
    late = Plan(Phase(), Phase((Pack((2, 3), 0),)), Phase((Pack((0, 1), 0),)))
    with pytest.raises(ValueError, match=r"an order with late packs, synchrony=Stale"):
        trained(order=late)


@pytest.mark.wide
def test_norms_are_of_all_gradients():
    """Whatever is late is so together; with a rate that changes, each gradient has that of its own step."""
    for make in (
        lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.8), momentum=0.9),
    ):
        networks.assert_equal(trained(optimizer=make()), trained("parameter-server", servers=1, optimizer=make()))


@pytest.mark.wide
def test_rows_of_embeddings():
    data = np.arange(60 * 6).reshape(60, 6) % 20, np.arange(60) % 5
    settings = {"data": data, "make": words, "rows": 15}
    networks.assert_close(trained(**settings), trained("parameter-server", **settings))


@pytest.mark.wide
@pytest.mark.parametrize("compression", [None, "int4"])
@pytest.mark.parametrize("scheme", ["all-reduce", "parameter-server"])
def test_a_run_that_is_stopped_goes_on_bitwise(scheme, compression, tmp_path):
    way = {"scheme": scheme, "devices": DEVICES, "order": "none", "synchrony": "stale:1", "compression": compression}
    assert_goes_on_bitwise(tmp_path, **way)


@pytest.mark.parametrize(("scheme", "order"), [WAYS[0], *parameters.widely(*WAYS[1:])])
def test_an_interrupt_just_after_a_step_leaves_the_weights_of_that_step(scheme, order, monkeypatch):
    """The gradient that waited is applied, and the next run begins after it."""

    def made():
        keras.utils.set_random_seed(0)
        pm = networks.in_way(networks.small(), scheme=scheme, devices=DEVICES, order=order, synchrony="stale")
        pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
        return pm

    run, done = TransferStep.__call__, []

    def interrupted(self, *arguments, **named):
        done.append(run(self, *arguments, **named))
        if len(done) == 3:
            raise KeyboardInterrupt
        return done[-1]

    stopped, whole = made(), made()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(TransferStep, "__call__", interrupted)
        networks.fit(stopped, *DATA, batch_size=20)
    networks.fit(whole, DATA[0][:60], DATA[1][:60], batch_size=20)
    for _ in range(2):
        networks.assert_equal(stopped.get_weights(), whole.get_weights())
        assert int(stopped.optimizer.iterations) == int(whole.optimizer.iterations)
        for each in (stopped, whole):
            networks.fit(each, *DATA, batch_size=20)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"bound=2.*Try bound=1"):
        pipetrain.ParameterServer(synchrony="stale:2")
    with pytest.raises(ValueError, match="Only all-reduce"):
        pipetrain.ParameterServer(synchrony="local:2")
    with pytest.raises(ValueError, match="Unknown synchrony"):
        pipetrain.AllReduce(synchrony="eventual")
    with pytest.raises(ValueError, match=r"topology='gossip', synchrony='stale:1'"):
        pipetrain.AllReduce(topology="gossip", synchrony="stale:1")
    with pytest.raises(ValueError, match="Only all-reduce and parameter-server"):
        networks.in_way(networks.small(), scheme="coded-reduce", children=2, synchrony="stale:1")
