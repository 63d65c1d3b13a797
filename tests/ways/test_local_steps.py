"""Workers that update weights of their own, and join them after so many steps."""

from __future__ import annotations

import inside
import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from checkpointed import STEPS, assert_goes_on_bitwise
from checkpointed import run as checkpointed
from transfer_models import convolutional, words

import pipetrain
from pipetrain.schemes.synchrony import LocalSGD
from pipetrain.schemes.transfers.plan import Pack, Phase, Plan

DEVICES = ("CPU:0", "CPU:1", "CPU:2")
DATA = networks.data(70)
NESTEROV = LocalSGD(steps=4, rate=0.7, momentum=0.9)


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


@pytest.mark.wide
def test_rows_of_embeddings_are_updated_by_each_worker():
    data = np.arange(60 * 6).reshape(60, 6) % 20, np.arange(60) % 5
    weights = trained(LocalSGD(steps=1, rate=1 - 1e-7), data, words, keras.optimizers.SGD(0.05), rows=15)
    networks.assert_close(weights, trained(None, data, words, keras.optimizers.SGD(0.05), rows=15))


@pytest.mark.parametrize("compression", [None, pytest.param("int4", marks=pytest.mark.wide)])
@pytest.mark.wide
def test_a_run_that_is_stopped_goes_on_bitwise(compression, tmp_path):
    synchrony = LocalSGD(steps=2, rate=0.7, momentum=0.9)
    way = {"scheme": "all-reduce", "devices": DEVICES, "order": "none", "synchrony": synchrony}
    way["compression"] = compression
    assert_goes_on_bitwise(tmp_path, **way)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        pytest.param(lambda: keras.optimizers.Adam(0.01), marks=pytest.mark.wide),
    ],
)
@pytest.mark.wide
def test_checkpoints_at_joins_change_nothing(make, tmp_path):
    """Each worker's optimizer keeps what it has gathered through a drain, and through a resume."""
    way = {"scheme": "all-reduce", "devices": DEVICES, "order": "none", "synchrony": "local:2"}
    whole, _ = checkpointed(tmp_path / "whole", optimizer=make(), every_steps=None, **way)
    often, _ = checkpointed(tmp_path / "often", optimizer=make(), every_steps=2, **way)
    _, history = checkpointed(tmp_path / "stopped", stop_after=STEPS + 3, optimizer=make(), every_steps=4, **way)
    assert history is None
    again, _ = checkpointed(tmp_path / "stopped", optimizer=make(), every_steps=4, **way)
    for pm in (often, again):
        networks.assert_equal(trained_weights(pm), trained_weights(whole))


def trained_weights(pm):
    return [each.numpy() for each in pm.model.trainable_variables]


def test_a_look_at_weights_joins_them_once():
    """An outer step with momentum moves weights even where workers have not moved: there is one at most at a step."""
    x, y = networks.data(60)
    found = []
    for after in (False, True):
        keras.utils.set_random_seed(0)
        pm = networks.in_way(networks.small(), scheme="all-reduce", devices=DEVICES, order="none", synchrony=NESTEROV)
        pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
        looks = [pipetrain.callbacks.Snapshots(3, lambda *given: None)] if after else []
        pm.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0, callbacks=looks)
        found.append(pm.get_weights())
    networks.assert_equal(*found)  # the look is at the epoch's end, where workers are joined anyway


@pytest.mark.parametrize("compression", [None, pytest.param("random-k:0.3", marks=pytest.mark.wide)])
def test_workers_without_rows_are_at_the_same_step(compression):
    """The last minibatch has one row, which one of three workers has; all go on with the same random numbers."""
    keras.utils.set_random_seed(0)
    way = {"order": "none", "synchrony": "local:2", "compression": compression, "devices": DEVICES}
    pm = networks.in_way(networks.small(), scheme="all-reduce", **way)
    pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
    x, y = networks.data(61)
    pm.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    assert len({int(w.groups[0].optimizer.iterations) for w in inside.strategy(pm)._weights}) == 1
    first, *others = ([each.numpy() for each in w.variables] for w in inside.strategy(pm)._weights)
    for other in others:
        networks.assert_equal(other, first)


def test_a_loss_that_is_a_sum_takes_as_long_steps_as_without():
    data = networks.data(60)
    loss = networks.crossentropy(reduction="sum")
    found = []
    for synchrony in (None, LocalSGD(steps=1, rate=1 - 1e-7)):
        keras.utils.set_random_seed(0)
        pm = networks.in_way(networks.small(), scheme="all-reduce", devices=DEVICES, order="none", synchrony=synchrony)
        pm.compile(keras.optimizers.SGD(0.001), loss)
        networks.fit(pm, *data, batch_size=15)
        found.append(pm.get_weights())
    networks.assert_close(*found)


@pytest.mark.wide
def test_what_changes_is_told_where_a_run_goes_on(tmp_path, capsys):
    way = {"scheme": "all-reduce", "devices": DEVICES, "order": "none"}
    checkpointed(tmp_path, stop_after=STEPS + 3, compression="top-k:0.2", **way)
    checkpointed(tmp_path, compression="int4", synchrony="local:2", verbose=2, **way)
    said = capsys.readouterr().out
    assert "compression int4 instead of top-k:0.2" in said and "synchrony local:2 instead of None" in said
    assert "of_worker" not in said


def test_keras_backup_is_refused(tmp_path):
    with pytest.raises(ValueError, match="PipelineCheckpoint"):
        pm = networks.in_way(networks.small(), scheme="all-reduce", devices=DEVICES, compression="top-k")
        pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
        networks.fit(pm, *networks.data(20), callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Only all-reduce"):
        networks.in_way(networks.small(), scheme="parameter-server", synchrony="local:2")
    with pytest.raises(ValueError, match="Unknown synchrony"):
        pipetrain.AllReduce(synchrony="seldom")
    for wrong in ({"steps": 0}, {"rate": 0}, {"momentum": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LocalSGD(**wrong)
    late = Plan(Phase(), Phase((Pack((0, 1, 2, 3), 4),)), Phase((Pack((4, 5), 4),)))
    with pytest.raises(ValueError, match="nothing late"):
        trained("local:2", order=late)


def of_open_shape(known):
    """Minibatches without end, whose data tell the length of a row's sequence or leave it open."""
    x = np.random.default_rng(0).normal(size=(8, 5, 4)).astype("float32")
    specs = tf.TensorSpec((8, 5 if known else None, 4)), tf.TensorSpec((8, 1))
    return tf.data.Dataset.from_generator(lambda: iter([(x, np.ones((8, 1)))] * 8), output_signature=specs)


@pytest.mark.parametrize("synchrony", [None, "local:2"])
def test_where_the_first_minibatch_tells_the_shapes_weights_are_the_same(synchrony):
    """Workers begin with what the compiled optimizer has gathered, also if they are made only then."""
    found = []
    for known in (True, False):
        keras.utils.set_random_seed(1)
        dense, pool = keras.layers.Dense(4), keras.layers.GlobalAveragePooling1D()
        model = keras.Sequential([keras.Input((None, 4)), dense, pool, keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        model.compile(optimizer, "mse")
        model.fit(np.ones((8, 5, 4)), np.ones((8, 1)), epochs=2, verbose=0)
        pm = networks.in_way(model, scheme="all-reduce", devices=DEVICES[:2], order="none", synchrony=synchrony)
        pm.compile(optimizer, "mse")
        pm.fit(of_open_shape(known), epochs=1, verbose=0)
        found.append(pm.get_weights())
    networks.assert_equal(*found)
