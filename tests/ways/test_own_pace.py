"""Workers of a parameter server that each take whole minibatches at their own pace."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

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
from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.run.gradient_exchange import Closed
from pipetrain.run.step_runner import Arrivals, Event, Exchange
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


def test_accuracy_and_losses():
    pm = made()
    history = networks.fit(pm, *DATA, epochs=12, batch_size=10).history
    assert history["loss"][-1] < history["loss"][0] * 0.8
    assert int(pm.optimizer.iterations) == 12 * 13
    assert pm.evaluate(*DATA, verbose=0, return_dict=True)["loss"] < history["loss"][0]
    assert 0 < max(pm._strategy.staleness) <= 2 * len(DEVICES)


def test_a_run_that_is_resumed_records_and_replays_as_a_whole_one(tmp_path):
    """Killed between two checkpoints, with moving statistics and Dropout: bitwise the same weights, the same record."""

    def run(directory, stop_after=None, **files):
        synchrony = Asynchronous(**{name: str(tmp_path / file) for name, file in files.items()})
        way = {"scheme": "parameter-server", "devices": DEVICES, "stages": None, "synchrony": synchrony}
        pm, history = checkpointed(tmp_path / directory, stop_after=stop_after, **way)
        assert (history is None) == (stop_after is not None)
        return pm.get_weights()

    whole = run("whole", record="order")
    run("stopped", stop_after=STEPS + 3, record="again", replay="order")
    assert [int(each[1]) for each in events(tmp_path / "again")][-1] >= 12  # behind the checkpoint of 12
    networks.assert_equal(run("stopped", record="again", replay="order"), whole)
    assert events(tmp_path / "again") == events(tmp_path / "order")
    with pytest.raises(ValueError, match="without minibatch 29, the last one before"):
        (tmp_path / "again").write_text("taken 0 0 0\napplied 0 0 0\n")
        run("stopped", record="again")
    assert events(tmp_path / "again")[1:] == [["applied", "0", "0", "0"]]


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
    problem = "not the one that was recorded.*replay='.*order', with 't.*Try the data"
    with pytest.raises(ValueError, match=problem):
        trained(Asynchronous(0, replay=file), epochs=1)
    with pytest.raises(ValueError, match=problem):
        trained(Asynchronous(6, replay=file), epochs=1, devices=DEVICES[:1])
    with pytest.raises(ValueError, match=problem):
        trained(Asynchronous(6, replay=file), epochs=1, data=networks.data(30))


@pytest.mark.wide
def test_a_record_is_of_all_that_a_model_is_trained_and_of_nothing_else(tmp_path):
    file = tmp_path / "order"
    orders = [Asynchronous(record=str(file)), Asynchronous(record=str(tmp_path / "again"), replay=str(file))]
    weights = []
    for order in orders:
        pm = made(order)
        networks.fit(pm, *DATA, epochs=1)
        networks.fit(pm, *DATA, epochs=1)
        pm.compile(keras.optimizers.SGD(0.01), networks.crossentropy())
        networks.fit(pm, *DATA, epochs=1)
        weights.append(pm.get_weights())
    networks.assert_equal(*weights)
    assert sum(each[0] == "applied" for each in events(file)) == 21
    before = file.read_text(encoding="utf-8")
    assert before == (tmp_path / "again").read_text(encoding="utf-8")
    pm = made(Asynchronous(record=str(file)))
    first = pm.get_weights()
    with pytest.raises(ValueError, match="A record that is there is not written over"):
        networks.fit(pm, *DATA)
    networks.assert_equal(pm.get_weights(), first)
    assert file.read_text(encoding="utf-8") == before


def test_moving_statistics_are_those_of_all_minibatches():
    """As on one device where one minibatch is trained on after another, whichever worker takes it."""

    def model():
        networks.draw_from(0)
        layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(momentum=0.9), keras.layers.Dense(5)]
        return keras.Sequential([keras.Input((networks.FEATURES,)), *layers])

    single = model()
    single.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
    networks.fit(single, *DATA, epochs=2, batch_size=20)
    networks.assert_close(trained("asynchronous:0", make=model), single.get_weights())


@pytest.mark.parametrize("waits", ["read", "apply"])
def test_nobody_waits_for_a_lost_server(waits):
    """A worker waits for a server that does not answer; whoever waits for the worker is told at once."""
    reached, answers, said = threading.Event(), threading.Event(), []
    exchange = Exchange(Arrivals(None, None), 2)
    calls = {"read": lambda: None, "apply": lambda: None}
    calls[waits] = lambda: (reached.set(), answers.wait(60))

    def work():
        with suppress(Closed):
            posted, version, _ = exchange.take(0, 0, calls["read"])
            exchange.bring(0, 0, posted, version, None, calls["apply"])

    def take_result():
        try:
            exchange.result(0)
        except Closed as error:
            said.append(error)

    exchange.post([], None, None)
    worker, main = (threading.Thread(target=each, daemon=True) for each in (work, take_result))
    closing = threading.Thread(target=exchange.close, daemon=True)
    try:
        worker.start()
        assert reached.wait(10)
        main.start()
        closing.start()
        for each in (closing, main):
            each.join(10)
            assert not each.is_alive()
        assert said
    finally:
        answers.set()


@pytest.mark.parametrize("due", [Event("taken", 0, -1, 0), Event("applied", 0, 2, 0), Event("taken", 0, 2, 0)])
def test_a_worker_that_there_is_not_is_not_waited_for(due, tmp_path):
    arrivals = Arrivals(None, None)
    arrivals._order = [due]
    exchange = Exchange(arrivals, 2)
    exchange.post([], None, None)
    exchange._busy = {-1, 2} if due.what == "applied" else set()
    closing = threading.Timer(10, exchange.close)  # which ends what waits
    closing.start()
    with pytest.raises(ValueError, match="not the one that was recorded"):
        exchange.result(0)
    closing.cancel()


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
    (tmp_path / "x").write_text("taken 0 0 0\n")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for other in (tmp_path / "x", f"{tmp_path}/./x", tmp_path / "link"):
        with pytest.raises(ValueError, match=r"in another file.*Try record=None"):
            Asynchronous(record=other, replay=str(tmp_path / "x"))
    with pytest.raises(TypeError, match="record=5"):
        Asynchronous(record=5)
    with pytest.raises(TypeError, match="replay=True"):
        Asynchronous(replay=True)
    for file, problem in ((tmp_path / "no" / "x", "no directory"), (tmp_path, "which is a directory")):
        with pytest.raises(ValueError, match=rf"record='{file}', .*{problem}.*Try record='arrivals"):
            made(Asynchronous(record=file))
    for name in ("asynchronous:", "stale:", "local:", "synchronous:"):
        with pytest.raises(ValueError, match=f"Unknown synchrony.*'{name}'"):
            pipetrain.ParameterServer(synchrony=name)
    with pytest.raises(ValueError, match="stateful"):
        made(make=stateful)
    bad = ("nothing", "take 0 0 0", "taken 0 -1 0", "taken 0 0", "taken 0 0 0 0", "")
    for text, told in [*((f"taken 0 0 0\n{each}\n", f"line 2: '{each}'") for each in bad), ("", "no event")]:
        (tmp_path / "order").write_text(text)
        with pytest.raises(ValueError, match=rf"No order of arrivals.*replay='.*order', {told}"):
            made(Asynchronous(replay=str(tmp_path / "order")))
    with pytest.raises(ValueError, match=r"No order of arrivals.*replay='.*nowhere', .*No such file"):
        made(Asynchronous(replay=str(tmp_path / "nowhere")))


def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(tmp_path):
    """Its record is set aside; without checkpoints it would be refused."""
    file, saving = tmp_path / "order", PipelineCheckpoint(tmp_path / "kept", every_steps=100)
    file.write_text("taken 0 0 0\n", encoding="utf-8")
    pm = made(Asynchronous(record=str(file)))
    networks.fit(pm, *DATA, epochs=1, callbacks=[saving])
    assert (tmp_path / "order.1").read_text(encoding="utf-8") == "taken 0 0 0\n"
    assert sum(each[0] == "applied" for each in events(file)) == 7


def test_a_replay_of_several_compilations_goes_on_from_no_checkpoint(tmp_path):
    file = tmp_path / "order"
    file.write_text("taken 0 0 0\napplied 0 0 0\ntaken 0 0 0\napplied 0 0 0\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"compiled anew.*after 1 is in it.*replay='.*order'. Try"):
        Arrivals(None, str(file)).go_on(1)
