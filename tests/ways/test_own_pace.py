"""Workers of a parameter server that each take whole minibatches at their own pace."""

from __future__ import annotations

import threading
import time

import inside
import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from checkpointed import STEPS
from checkpointed import run as checkpointed
from transfer_models import convolutional, stateful, words

import pipetrain
from pipetrain.schemes.synchrony import Asynchronous

DEVICES = ("CPU:0", "CPU:1", "CPU:2")
DATA = networks.data(130)


def made(synchrony="asynchronous", make=networks.small, optimizer=None, **settings):
    keras.utils.set_random_seed(0)
    settings = {"devices": DEVICES, "synchrony": synchrony, **settings}
    pm = networks.in_way(make(), scheme="parameter-server", **settings)
    pm.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy(), metrics=["accuracy"])
    return pm


def trained(*given, data=DATA, epochs=2, **settings):
    pm = made(*given, **settings)
    networks.fit(pm, *data, epochs=epochs, batch_size=20)
    return pm.get_weights()


def events(file):
    return [line.split() for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("servers", [1, 3])
def test_with_a_bound_of_none_it_is_training_on_one_device(servers):
    """Two epochs, whose last minibatch is short."""
    single = networks.small()
    single.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
    networks.fit(single, *DATA, epochs=2, batch_size=20)
    networks.assert_close(trained("asynchronous:0", servers=servers), single.get_weights())


@pytest.mark.parametrize("make", [networks.small, convolutional, words])
def test_what_was_recorded_is_replayed_bitwise(make, tmp_path):
    data = DATA
    if make is convolutional:
        data = np.random.default_rng(0).normal(size=(130, *make().input_shape[1:])).astype("float32"), DATA[1]
    elif make is words:
        data = np.arange(130 * 6).reshape(130, 6) % 20, DATA[1]
    files = [tmp_path / name for name in ("first", "again")]
    first = trained(Asynchronous(record=str(files[0])), make=make, data=data)
    again = trained(Asynchronous(record=str(files[1]), replay=str(files[0])), make=make, data=data)
    networks.assert_equal(first, again)
    assert events(files[0]) == events(files[1])
    applied = [each for each in events(files[0]) if each[0] == "applied"]
    assert sorted(int(each[1]) for each in applied) == [*range(14)]


class Slow(keras.layers.Layer):
    """Waits in the first minibatch that it sees, while others go on."""

    waited = threading.Event()

    def call(self, x):
        def wait(values):
            if not Slow.waited.is_set():
                Slow.waited.set()
                time.sleep(1.0)
            return values

        return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape) if not x.dtype.is_integer else x


def test_nobody_waits_for_a_slow_worker_up_to_the_bound(tmp_path):
    """One of three workers takes a second for its first minibatch: others apply theirs as far as the bound goes."""
    for bound in (4, 1):
        file = tmp_path / f"{bound}"
        Slow.waited.clear()
        model = keras.Sequential([keras.Input((networks.FEATURES,)), Slow(), keras.layers.Dense(networks.CLASSES)])
        trained(Asynchronous(bound, record=str(file)), make=lambda model=model: model, epochs=1)
        found = events(file)
        staleness = max(int(each[3]) for each in found if each[0] == "applied")
        assert bound <= staleness <= 2 * bound, found
        open_, begun = set(), -1
        for what, number, *_ in found:
            begun = max(begun, int(number))
            (open_.add if what == "taken" else open_.remove)(number)
            assert not open_ or begun - min(map(int, open_)) <= bound


def test_accuracy_losses_and_checkpoints(tmp_path):
    pm = made()
    history = networks.fit(pm, *DATA, epochs=12, batch_size=10).history
    assert history["loss"][-1] < history["loss"][0] * 0.8
    assert int(pm.optimizer.iterations) == 12 * 13
    assert pm.evaluate(*DATA, verbose=0, return_dict=True)["loss"] < history["loss"][0]
    assert 0 < max(pm._strategy.staleness) <= 2 * len(DEVICES)
    way = {"scheme": "parameter-server", "devices": DEVICES, "stages": None, "synchrony": "asynchronous:0"}
    whole, _ = checkpointed(tmp_path / "whole", **way)
    _, history = checkpointed(tmp_path / "stopped", stop_after=STEPS + 3, **way)
    assert history is None
    again, _ = checkpointed(tmp_path / "stopped", **way)
    assert len(whole.get_weights()) == len(again.get_weights())


def test_snapshots_are_of_so_many_updates():
    kept = {}
    pm = made("asynchronous:0")
    looks = pipetrain.callbacks.Snapshots(7, lambda step, model: kept.update({step: model.get_weights()}))
    networks.fit(pm, *DATA, epochs=2, batch_size=20, callbacks=[looks])
    assert sorted(kept) == [7, 14]
    networks.assert_close(kept[7], trained("asynchronous:0", epochs=1))
    networks.assert_equal(kept[14], pm.get_weights())
    looks = pipetrain.callbacks.Snapshots(2, lambda step, model: kept.update({step: model.get_weights()}))
    networks.fit(made(), *DATA, epochs=2, batch_size=20, callbacks=[looks])
    assert {2, 4, 6, 8, 10, 12, 14} <= {*kept}


def test_an_error_reaches_the_caller():
    class Failing(keras.layers.Layer):
        def call(self, x):
            def fail(values):
                raise ZeroDivisionError("no such minibatch")

            return tf.ensure_shape(tf.numpy_function(fail, [x], x.dtype), x.shape)

    model = keras.Sequential([keras.Input((networks.FEATURES,)), Failing(), keras.layers.Dense(networks.CLASSES)])
    with pytest.raises(tf.errors.OpError, match="no such minibatch"):
        trained(make=lambda: model)
    assert not [each for each in threading.enumerate() if each.name.startswith("pipetrain worker")]


def test_an_interrupt_leaves_the_weights_of_what_was_applied():
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                raise KeyboardInterrupt

    pm = made()
    with pytest.raises(KeyboardInterrupt):
        networks.fit(pm, *DATA, batch_size=10, callbacks=[Interrupt()])
    arrivals = inside.strategy(pm)._runner.arrivals.events
    assert int(pm.optimizer.iterations) == sum(each.what == "applied" for each in arrivals)
    assert not [each for each in threading.enumerate() if each.name.startswith("pipetrain worker")]
    networks.fit(pm, *DATA, batch_size=10)
    assert all(np.isfinite(each).all() for each in pm.get_weights())


def test_an_order_that_cannot_be_is_no_deadlock(tmp_path):
    """Recorded with another bound, with more workers, or of a run that drains elsewhere."""
    file = str(tmp_path / "order")
    trained(Asynchronous(6, record=file), epochs=1)
    problem = "not the one that was recorded"
    with pytest.raises(ValueError, match=problem):
        trained(Asynchronous(0, replay=file), epochs=1)
    with pytest.raises(ValueError, match=problem):
        trained(Asynchronous(6, replay=file), epochs=1, devices=DEVICES[:1])
    with pytest.raises(ValueError, match=problem):
        trained(Asynchronous(6, replay=file), epochs=1, data=networks.data(30))


def test_it_is_estimated_beside_other_ways():
    assert "parameter-server, synchrony asynchronous" in str(made().explain(60))
    profile = pipetrain.profile(networks.small(), 12)
    with pytest.raises(ValueError, match="not simulated"):
        pipetrain.simulate_order(profile, "parameter-server", 2, synchrony="asynchronous")


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Only parameter-server"):
        pipetrain.AllReduce(synchrony="asynchronous")
    with pytest.raises(ValueError, match="compression='int8'"):
        pipetrain.ParameterServer(synchrony="asynchronous", compression="int8")
    with pytest.raises(ValueError, match="order='tic'"):
        pipetrain.ParameterServer(synchrony="asynchronous", order="tic")
    with pytest.raises(ValueError, match="bound=-1"):
        Asynchronous(-1)
    with pytest.raises(ValueError, match="replay='x'"):
        Asynchronous(record="x", replay="x")
    with pytest.raises(ValueError, match="stateful"):
        made(make=stateful)
    (tmp_path / "order").write_text("nothing\n")
    with pytest.raises(ValueError, match="No order of arrivals"):
        trained(Asynchronous(replay=str(tmp_path / "order")))
