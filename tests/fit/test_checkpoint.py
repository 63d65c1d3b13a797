"""Training that is stopped, killed or damaged, and goes on."""

from __future__ import annotations

import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import keras
import killed_training
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from checkpointed import BATCH, STEPS, Stop, arrays, model, pipeline, run

import pipetrain
from pipetrain.callbacks import PipelineCheckpoint, Snapshots
from pipetrain.checkpoint.state import not_finite
from pipetrain.checkpoint.store import Store
from pipetrain.frontend.pipeline_strategy import PipelineStrategy
from pipetrain.schemes.splitting import window


def dataset():
    return {"x": tf.data.Dataset.from_tensor_slices(networks.data(BATCH * STEPS)).shuffle(80, seed=1).batch(BATCH)}


def endless():
    return {"x": dataset()["x"].repeat(), "steps_per_epoch": STEPS}


def generator():
    x, y = networks.data(BATCH * 40)
    parts = itertools.cycle(zip(np.split(x, 40), np.split(y, 40), strict=True))
    return {"x": ((a, b) for a, b in parts), "steps_per_epoch": STEPS}


def default():
    """That of ``networks.pipeline``."""


def adam():
    return keras.optimizers.Adam(0.01)


class Batches(keras.utils.PyDataset):
    """Another order in every epoch."""

    def __init__(self):
        super().__init__()
        self._data, self._order = networks.data(BATCH * STEPS), np.arange(STEPS)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = slice(BATCH * self._order[index], BATCH * (self._order[index] + 1))
        return tuple(each[rows] for each in self._data)

    def on_epoch_end(self):
        self._order = np.roll(self._order, 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """``run``, each made once: its weights and history, its checkpoints in a folder if one is given."""
    known = {}

    def once(folder=None, make=default, **settings):
        key = make, *sorted(settings.items())
        if key not in known:
            directory = tmp_path_factory.mktemp("run")
            pm, history = run(directory, optimizer=make(), **settings)
            known[key] = directory, pm.get_weights(), history
        directory, weights, history = known[key]
        if folder:
            shutil.copytree(directory, folder, dirs_exist_ok=True)
        return weights, history

    return once


WAYS = {
    "spectrain": {},
    "spectrain, nesterov": {"optimizer": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)},
    "spectrain, replicas": {"stages": 2, "replicas": (2, 1)},
    "spectrain, fitted, at rescaled rates": {  # with all that predictions remember: the last rate, the fit
        "optimizer": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
        "horizon": "fitted",
        "rescale_steps": 20,
    },
    "spectrain, one target": {  # with a longer momentum, and its displacement beside the slots
        "optimizer": lambda: keras.optimizers.Nadam(0.01),
        "horizon": "target",
        "microbatches": 2,
    },
    "2bw": {"microbatches": 3},
    "2bw, predicted": {"microbatches": 3, "horizon": 1.5},
    "weight-stashing": {"optimizer": lambda: keras.optimizers.Adam(0.01)},
    "gpipe": {"optimizer": lambda: keras.optimizers.Nadam(0.01), "microbatches": 2},
    "1f1b": {"optimizer": lambda: keras.optimizers.Adafactor(0.01), "microbatches": 2},
    "single": {},
    "data-parallel": {"optimizer": lambda: keras.optimizers.Adam(0.01), "devices": ("CPU:0", "CPU:1")},
}


OFTEN = "spectrain", "single"


@pytest.mark.wide
@pytest.mark.parametrize("way", parameters.by_default(WAYS, *OFTEN))
def test_stopped_twice_and_resumed_is_bitwise_as_never_stopped(way, trained, tmp_path, capsys):
    """Stopped in the second epoch; then (once is enough) again before the next checkpoint.

    A run that was never stopped has no checkpoints either, but where threads drain for each.
    """
    settings = dict(WAYS[way])
    make = settings.pop("optimizer", default)
    scheme = way.split(",")[0]
    if scheme != "spectrain":  # which is what a pipeline is without a scheme
        settings["scheme"] = scheme
    never = {} if "fitted" in way else {"every_steps": None}
    whole, history = trained(make=make, **never, **settings)
    run(tmp_path / "cut", stop_after=15, optimizer=make(), **settings)
    if way == "spectrain":
        run(tmp_path / "cut", stop_after=3, optimizer=make(), **settings)
    capsys.readouterr()
    again, rest = run(tmp_path / "cut", optimizer=make(), verbose=2, **settings)
    assert "Going on from" in (said := capsys.readouterr().out)
    assert "12 steps done, 2 of them in epoch 2." in said
    networks.assert_equal(again.get_weights(), whole)
    for name, values in networks.without_figures(history).items():
        np.testing.assert_allclose(rest[name], values[1:], rtol=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize(
    "data",
    parameters.by_default([dataset, endless, generator, Batches], dataset),
    ids=lambda each: each.__name__,
)
def test_every_kind_of_data_goes_on_where_it_was(data, tmp_path):
    def feed():
        return {"x": data()} if data is Batches else data()

    whole, _ = run(tmp_path / "whole", data=feed)
    run(tmp_path / "cut", data=feed, stop_after=25)
    again, _ = run(tmp_path / "cut", data=feed)
    networks.assert_equal(again.get_weights(), whole.get_weights())


def test_an_epoch_that_is_passed_over_leaves_the_next_one_its_own_order(tmp_path):
    """Of a data set that is shuffled anew in every epoch."""

    def weights_after(epochs, folder):
        pm = networks.fresh("single")
        data = tf.data.Dataset.from_tensor_slices(networks.data(32)).shuffle(32, seed=1).batch(8)
        saving = PipelineCheckpoint(tmp_path / folder, every_steps=4)
        pm.fit(data, epochs=epochs, shuffle=False, verbose=0, callbacks=[saving])
        return pm.get_weights()

    whole = weights_after(2, "whole")
    once = weights_after(1, "stopped")
    networks.assert_equal(weights_after(2, "stopped"), whole)
    assert (once[0] != whole[0]).any()


@pytest.mark.wide
@pytest.mark.parametrize("stages", parameters.by_default([1, 5], 5))
def test_another_number_of_stages_goes_on_and_says_so(stages, trained, tmp_path, capsys):
    """A synchronous scheme trains as the unsplit model does, however it is cut."""
    settings = {"scheme": "1f1b", "microbatches": 1}
    whole, _ = trained(make=adam, **settings)
    trained(tmp_path / "cut", make=adam, stop_after=15, **settings)
    again, _ = run(tmp_path / "cut", optimizer=adam(), stages=stages, verbose=2, **settings)
    said = capsys.readouterr().out
    assert f"Different now: {stages} stage{'' if stages == 1 else 's'} instead of 3." in said
    networks.assert_close(again.get_weights(), whole)


@pytest.mark.wide
def test_another_scheme_and_another_optimizer_go_on_and_say_so(trained, tmp_path, capsys):
    trained(tmp_path, stop_after=15)
    run(tmp_path, scheme="weight-stashing", optimizer=adam(), stop_after=1, verbose=2)
    said = capsys.readouterr().out
    assert "scheme weight-stashing instead of spectrain; optimizer Adam instead of SGD" in said
    assert "velocities from zero" in said


@pytest.mark.wide
def test_another_model_is_refused(trained, tmp_path):
    trained(tmp_path, stop_after=15)
    pm = networks.pipeline()
    with pytest.raises(ValueError, match=r"another model. Received: .*Try"):
        pm.fit(**arrays(), verbose=0, callbacks=[PipelineCheckpoint(tmp_path)])


@pytest.mark.wide
def test_checkpoints_of_another_run_are_not_overwritten(trained, tmp_path):
    trained(tmp_path, stop_after=15)
    with pytest.raises(ValueError, match=r"checkpoints of another run.*resume=False"):
        pipeline().fit(**arrays(), verbose=0, callbacks=[PipelineCheckpoint(tmp_path, resume=False)])
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.wide
def test_a_finished_run_has_nothing_left_to_do_and_more_epochs_go_on(trained, tmp_path):
    whole, _ = trained(tmp_path)
    again, history = run(tmp_path)
    assert history == {}
    networks.assert_equal(again.get_weights(), whole)
    checkpoint = PipelineCheckpoint(tmp_path)
    longer = again.fit(**arrays(), epochs=4, verbose=0, callbacks=[checkpoint])
    assert checkpoint.resumed_at == 3 * STEPS
    assert longer.epoch == [3]


@pytest.mark.wide
def test_a_learning_rate_and_what_callbacks_remember_go_on(tmp_path):
    """ReduceLROnPlateau waits for a better epoch, EarlyStopping for the best, across the interruption."""

    def callbacks():
        return [
            keras.callbacks.ReduceLROnPlateau(monitor="loss", min_delta=10.0, patience=2, factor=0.5),
            keras.callbacks.EarlyStopping(monitor="loss", min_delta=10.0, patience=2, restore_best_weights=True),
        ]

    whole, history = run(tmp_path / "whole", callbacks=callbacks())
    run(tmp_path / "cut", callbacks=callbacks(), stop_after=25)
    again, rest = run(tmp_path / "cut", callbacks=callbacks())
    assert history["learning_rate"] == pytest.approx([0.05, 0.05, 0.05])
    assert float(again.optimizer.learning_rate) == pytest.approx(0.025)
    assert rest["loss"] == pytest.approx(history["loss"][-1:])
    networks.assert_equal(again.get_weights(), whole.get_weights())  # the first epoch's


@pytest.mark.wide
@pytest.mark.parametrize("relative", parameters.by_default([True, False], True))
def test_a_rate_scheduler_goes_on(relative, tmp_path):
    """A schedule that halves the last rate runs once an epoch, in the epoch that is resumed too."""
    rule = (lambda epoch, rate: rate / 2) if relative else (lambda epoch, rate: 0.1 / (epoch + 2))

    def callbacks():
        return [keras.callbacks.LearningRateScheduler(rule)]

    whole, history = run(tmp_path / "whole", callbacks=callbacks())
    run(tmp_path / "cut", callbacks=callbacks(), stop_after=15)
    again, rest = run(tmp_path / "cut", callbacks=callbacks())
    assert rest["learning_rate"] == history["learning_rate"][1:]
    networks.assert_equal(again.get_weights(), whole.get_weights())


@pytest.mark.wide
def test_another_learning_rate_is_taken(trained, tmp_path, capsys):
    trained(tmp_path, stop_after=15)
    slower, _ = run(tmp_path, optimizer=keras.optimizers.SGD(0.01, momentum=0.9), verbose=2)
    assert float(slower.optimizer.learning_rate) == pytest.approx(0.01)
    assert "learning rate 0.00999" in capsys.readouterr().out


@pytest.mark.wide
def test_ended_by_early_stopping_is_ended_and_what_it_knows_stays(tmp_path):
    def callbacks():
        return [keras.callbacks.EarlyStopping(monitor="loss", min_delta=10.0, patience=1, restore_best_weights=True)]

    whole, history = run(tmp_path, callbacks=callbacks())
    assert len(history["loss"]) == 2
    before = Store(tmp_path, 3).newest()[0].about
    for _ in range(2):
        again, rest = run(tmp_path, callbacks=callbacks())
        assert rest == {}
        networks.assert_equal(again.get_weights(), whole.get_weights())
    assert Store(tmp_path, 3).newest()[0].about == before


class StopAt(keras.callbacks.Callback):
    """Stops training, as a callback may, after this minibatch of this epoch, or at the end of the epoch (None)."""

    def __init__(self, epoch, batch):
        super().__init__()
        self._at, self._epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = (self._epoch, batch) == self._at

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training |= (epoch, None) == self._at


def unknown():
    """The same minibatches, which end without having said how many they are."""
    x, y = networks.data(BATCH * STEPS)
    parts = list(zip(np.split(x, STEPS), np.split(y, STEPS), strict=True))
    like = (tf.TensorSpec([None, x.shape[1]]), tf.TensorSpec([None], tf.int32))
    return {"x": tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=like)}


def stopped(folder, at, data, **settings):
    """Trained until ``StopAt(*at)`` stops it, then to the end: where it went on, the model, and the second History."""
    run(folder, data=data, callbacks=[StopAt(*at)], every_steps=100, **settings)
    position = Store(folder, 3).newest()[0].about["position"]
    again, history = run(folder, data=data, every_steps=100, **settings)
    if data is arrays or settings["scheme"] != "data-parallel":  # MirroredStrategy makes an empty step of unknown data
        assert int(again.optimizer.iterations.numpy()) == 3 * STEPS
    return position, again, history


SYNCHRONOUS = {"scheme": "1f1b", "microbatches": 2}
STOPS = [(0, 2), (1, 4), (1, STEPS - 2), (0, STEPS - 1), (1, STEPS - 1), (0, None), (1, None)]


@pytest.mark.wide
@pytest.mark.parametrize("data", parameters.by_default([arrays, unknown], unknown))
@pytest.mark.parametrize("at", parameters.by_default(STOPS, (0, 2), (0, STEPS - 1)))
def test_stopped_anywhere_a_synchronous_run_goes_on_as_never_stopped(at, data, trained, tmp_path):
    """Nothing is left out and nothing is done twice, and the metrics are those of whole epochs."""
    weights, whole = trained(data=data, every_steps=100, **SYNCHRONOUS)
    position, again, history = stopped(tmp_path, at, data, **SYNCHRONOUS)
    epoch, batch = at
    last = batch is None or (batch + 1 == STEPS and data is arrays)  # of unknown data nobody can say so
    assert position == ([epoch + 1, 0] if last else [epoch, batch + 1])
    networks.assert_close(again.get_weights(), weights)
    for name, values in networks.without_figures(history).items():
        assert len(values) == 3 - position[0]
        assert values == pytest.approx(whole[name][-len(values) :], rel=1e-4)


IN_FLIGHT = [("spectrain", (0, 2), arrays), ("spectrain", (1, STEPS - 2), unknown), ("spectrain", (1, None), unknown)]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "at", "data"), parameters.combinations(["spectrain", "2bw"], STOPS, [arrays, unknown], default=IN_FLIGHT)
)
def test_stopped_anywhere_what_is_in_flight_is_done(scheme, at, data, tmp_path):
    """Minibatches that were under way when a callback stopped training are done, and not done again."""
    (epoch, step), _, history = stopped(tmp_path, at, data, scheme=scheme)
    assert len(history["loss"]) == 3 - epoch
    ahead = window(3, 4 if scheme == "2bw" else 1, flushes=False)
    assert step == 0 or step == min(STEPS, at[1] + ahead)


@pytest.mark.wide
@pytest.mark.parametrize("data", parameters.by_default([arrays, unknown], unknown))
def test_data_parallelism_stopped_within_an_epoch_goes_on_within_it(data, trained, tmp_path):
    settings = {"scheme": "data-parallel", "devices": ("CPU:0", "CPU:1")}
    position, again, _ = stopped(tmp_path, (0, 2), data, **settings)
    assert position == [0, 3]
    networks.assert_close(again.get_weights(), trained(data=data, every_steps=100, **settings)[0])


@pytest.mark.wide
@pytest.mark.parametrize("data", [arrays, unknown])
def test_early_stopping_at_the_end_of_an_epoch_of_any_length(data, tmp_path):
    early = keras.callbacks.EarlyStopping("loss", mode="max", patience=1)
    _, history = run(tmp_path, data=data, callbacks=[early], every_steps=100)
    about = Store(tmp_path, 3).newest()[0].about
    assert (about["ended"], about["position"]) == (True, [len(history["loss"]), 0])
    assert run(tmp_path, data=data, callbacks=[keras.callbacks.EarlyStopping("loss", mode="max", patience=1)])[1] == {}


@pytest.mark.wide
@pytest.mark.parametrize("data", parameters.by_default([arrays, unknown], unknown))
def test_what_is_evaluated_after_a_stop_is_not_taken_for_the_epoch_s_metrics(data, trained, tmp_path):
    """A callback that evaluates when it begins takes nothing from the epoch that goes on either."""
    x, y = networks.data(24, seed=3)

    def evaluate(*_):
        pm.evaluate(x, y, verbose=0)

    _, whole = trained(data=data, every_steps=100, **SYNCHRONOUS)
    for stop in ([StopAt(0, 2)], []):
        pm = pipeline(**SYNCHRONOUS)
        looks = keras.callbacks.LambdaCallback(on_train_begin=evaluate, on_epoch_end=evaluate)
        callbacks = [*stop, looks, PipelineCheckpoint(tmp_path, every_steps=100)]
        history = pm.fit(**data(), epochs=3, validation_data=(x, y), verbose=0, callbacks=callbacks).history
    assert history["loss"] == pytest.approx(whole["loss"], rel=1e-4)


class Looks(keras.callbacks.Callback):
    """Evaluates when an epoch begins, and keeps the weights of each epoch's end."""

    def __init__(self, x, y):
        super().__init__()
        self._data, self.weights = (x, y), []

    def on_epoch_begin(self, epoch, logs=None):
        self.model.evaluate(*self._data, verbose=0)

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(self.model.get_weights())


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "metrics"),
    parameters.combinations(["1f1b", "spectrain"], [None, ["accuracy"]], default=[("1f1b", None)]),
)
def test_an_epoch_without_a_step_left_has_its_logs_and_is_validated(scheme, metrics, tmp_path):
    """Of data of unknown length nobody knows that the stop, and what was in flight then, came to their end."""
    batch = STEPS - 1 if scheme == "1f1b" else STEPS - 3
    x, y = networks.data(24, seed=3)
    settings = {**unknown(), "epochs": 2, "validation_data": (x, y), "verbose": 0}
    histories, kept = [], []
    looks = Looks(x, y)
    for callback in (StopAt(0, batch), looks):
        keras.utils.set_random_seed(0)
        pm = pipetrain.PipelineModel(model(), stages=3, scheme=scheme)
        pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy(), metrics=metrics)
        callbacks = [PipelineCheckpoint(tmp_path, every_steps=100), callback]
        histories.append(networks.without_figures(pm.fit(**settings, callbacks=callbacks).history))
        kept.append(pm.get_weights())
    first, second = histories
    networks.assert_equal(looks.weights[0], kept[0])
    assert list(second) == list(first)
    for name, (value,) in first.items():
        assert len(second[name]) == 2
        assert second[name][0] == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
def test_more_epochs_have_their_own_metrics(tmp_path):
    x, y = networks.data(BATCH * STEPS)
    settings = {"batch_size": BATCH, "verbose": 0, "validation_data": (x[:40], y[:40])}
    whole = pipeline().fit(x, y, epochs=4, callbacks=[PipelineCheckpoint(tmp_path / "a")], **settings).history
    pipeline().fit(x, y, epochs=3, callbacks=[PipelineCheckpoint(tmp_path / "b")], **settings)
    longer = pipeline().fit(x, y, epochs=4, callbacks=[PipelineCheckpoint(tmp_path / "b")], **settings).history
    for name, values in networks.without_figures(longer).items():
        assert values == pytest.approx(whole[name][3:])


@pytest.mark.slow
def test_data_of_unknown_length_may_stop_at_the_end_of_an_epoch(tmp_path):
    whole, history = run(tmp_path / "whole", data=unknown, every_steps=5)
    run(tmp_path / "cut", data=unknown, every_steps=5, stop_after=11)
    again, rest = run(tmp_path / "cut", data=unknown, every_steps=5)
    networks.assert_equal(again.get_weights(), whole.get_weights())
    assert rest["loss"] == pytest.approx(history["loss"])  # the first is as it was, though nothing is left of it


@pytest.mark.wide
def test_snapshots_change_nothing(trained, tmp_path):
    """They may be looked at after a drain: training goes on with the newest weights."""
    seen, _ = run(tmp_path, callbacks=[Snapshots(3, lambda step, model: None)])
    networks.assert_equal(seen.get_weights(), trained()[0])


@pytest.mark.wide
def test_checkpoints_after_a_damaged_one_are_kept(trained, tmp_path):
    trained(tmp_path)
    newest = Store(tmp_path, 3).paths()[-1]
    newest.write_bytes(b"")
    run(tmp_path, stop_after=2, every_steps=1)
    assert [path.name for path in Store(tmp_path, 3).paths()][-1] == "step-00000029.npz"


@pytest.mark.wide
def test_a_list_of_keras_own_is_taken_again_and_again():
    pm = pipeline()
    listed = keras.callbacks.CallbackList([keras.callbacks.History()], model=pm, epochs=1, steps=STEPS)
    for _ in range(2):
        pm.fit(**arrays(), verbose=0, callbacks=listed)
    assert int(pm.optimizer.iterations) == 2 * STEPS


def test_two_checkpoints_and_places_that_cannot_be_written_are_refused(tmp_path):
    pm = pipeline()
    with pytest.raises(ValueError, match="One PipelineCheckpoint can be served"):
        pm.fit(
            **arrays(), verbose=0, callbacks=[PipelineCheckpoint(tmp_path / "a"), PipelineCheckpoint(tmp_path / "b")]
        )
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written there.*Try another"):
        pm.fit(**arrays(), verbose=0, callbacks=[PipelineCheckpoint(tmp_path / "file")])


def test_only_the_newest_are_kept_and_nothing_half_written(tmp_path):
    (tmp_path / ".step-00000002.npz.1.part").write_bytes(b"left by a process that was killed")
    run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08}.npz" for step in (24, 28, 30)]


@pytest.mark.wide
def test_a_damaged_checkpoint_is_passed_over_and_said_so(trained, tmp_path, capsys):
    whole, _ = trained(tmp_path)
    newest, before = Store(tmp_path, 3).paths()[::-1][:2]
    newest.write_bytes(newest.read_bytes()[:-100])
    capsys.readouterr()
    again, _ = run(tmp_path, verbose=2)
    said = capsys.readouterr().out
    assert f"{newest.name} is damaged" in said
    assert f"Going on from {before}" in said
    networks.assert_equal(again.get_weights(), whole)


@pytest.mark.wide
def test_no_whole_checkpoint_is_an_error(tmp_path):
    run(tmp_path, stop_after=5)
    for path in Store(tmp_path, 3).paths():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"No checkpoint can be read. .*step-00000004.npz is damaged.*Try"):
        run(tmp_path)


def test_flipped_bits_are_found(tmp_path):
    """Every flip of 300 either is found, or changes nothing that is read."""
    rng = np.random.default_rng(0)
    store = Store(tmp_path, 3)
    written = {"weight/0": rng.normal(size=(20, 20)).astype("float32"), "slot/0/_momentums": np.arange(7.0)}
    path = store.write(1, written, {"updates": 1, "position": [0, 1]})
    whole, found = path.read_bytes(), 0
    about = store.newest()[0].about
    for position in rng.integers(0, 8 * len(whole), 300):
        flipped = bytearray(whole)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        try:
            read, _ = store.newest()
        except ValueError:
            found += 1
            continue
        assert read.about == about
        assert read.arrays.keys() == written.keys()
        networks.assert_equal(read.arrays.values(), written.values())
    assert found > 250


@pytest.mark.wide
def test_a_full_disk_is_said_and_training_goes_on(trained, tmp_path, capsys):
    """Files beyond 3 kB cannot be written for a while: as on a full disk, the file is cut short."""

    class Full(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            limit = 3000 if epoch == 1 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    whole, _ = trained()
    try:
        pm, _ = run(tmp_path / "full", callbacks=[Full()], verbose=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    said = capsys.readouterr().out
    assert "The checkpoint of step 12 could not be written (File too large); the newest is step-00000008.npz." in said
    networks.assert_equal(pm.get_weights(), whole)
    assert [path.name for path in (tmp_path / "full").iterdir() if path.name.startswith(".")] == []


def test_a_loss_that_is_not_finite_is_not_kept(tmp_path):
    class Spoil(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch >= 5:
                logs["loss"] = float("nan")

    with pytest.raises(FloatingPointError):
        run(tmp_path, callbacks=[Spoil()], every_steps=2)
    assert Store(tmp_path, 3).newest()[0].about["updates"] == 4


@pytest.mark.wide
def test_weights_that_are_not_finite_are_not_kept_at_the_end_either(tmp_path):
    """Stages have gone on to minibatches whose losses no step has seen: so far before them may the last one be."""
    x, y = networks.data(BATCH * 60)
    pm = pipeline()
    callbacks = [keras.callbacks.TerminateOnNaN(), PipelineCheckpoint(tmp_path, every_steps=2)]
    pm.fit(
        np.where(np.arange(len(x))[:, None] < 40 * BATCH, x, np.nan),
        y,
        BATCH,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    found, _ = Store(tmp_path, 3).newest()
    assert 40 - 24 <= found.about["updates"] <= 40 and not not_finite(found.arrays)


@pytest.mark.parametrize("name", ["every_steps", "keep"])
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_impossible_numbers_are_refused(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"Received: {name}={value!r}"):
        PipelineCheckpoint(tmp_path, **{name: value})


def test_other_models_are_refused_by_name(tmp_path):
    plain = model()
    plain.compile("sgd", loss=networks.crossentropy())
    with pytest.raises(TypeError, match=r"class Sequential. Try pipetrain.PipelineModel"):
        plain.fit(**arrays(), verbose=0, callbacks=[PipelineCheckpoint(tmp_path)])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("number", "ends"),
    [(signal.SIGINT, KeyboardInterrupt), pytest.param(signal.SIGTERM, SystemExit, marks=pytest.mark.slow)],
)
def test_a_signal_saves_and_says_so(number, ends, trained, tmp_path, capsys):
    """The result is that of a run without signals."""

    class Signal(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch) == (1, 4):
                os.kill(os.getpid(), number)

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    whole, _ = trained(scheme="1f1b")
    with pytest.raises(ends) as raised:
        run(tmp_path / "cut", scheme="1f1b", callbacks=[Signal()], every_steps=100, verbose=2)
    if ends is SystemExit:
        assert raised.value.code == 143
    said = capsys.readouterr().out
    assert f"Stopped by {number.name} after 15 steps: step 15 is in {tmp_path / 'cut'}" in said
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    again, _ = run(tmp_path / "cut", scheme="1f1b", every_steps=100)
    networks.assert_close(again.get_weights(), whole, 1e-6)


def interrupt(*_, **logs):
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.wide
@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_is_obeyed_where_nothing_is_left_to_train(number, ends, trained, tmp_path, capsys):
    """No checkpoint was due then, and the signal was lost."""
    trained(tmp_path, scheme="1f1b")
    signalling = keras.callbacks.LambdaCallback(on_train_end=lambda logs: os.kill(os.getpid(), number))
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ends) as raised:
        run(tmp_path, scheme="1f1b", callbacks=[signalling], verbose=2)
    if ends is SystemExit:
        assert raised.value.code == 143
    assert f"Stopped by {number.name} after 30 steps: step 30 is in {tmp_path}" in capsys.readouterr().out
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    again, history = run(tmp_path, scheme="1f1b")  # the signal is not heard twice
    assert int(again.optimizer.iterations) == 30 and history == {}


@pytest.mark.wide
def test_a_signal_after_the_last_checkpoint_is_obeyed(tmp_path, monkeypatch, capsys):
    """While the pipeline's threads end."""
    finish = PipelineStrategy.finish
    monkeypatch.setattr(PipelineStrategy, "finish", lambda self: interrupt() or finish(self))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, scheme="1f1b", every_steps=100, verbose=2)
    assert f"Stopped by SIGINT after 30 steps: step 30 is in {tmp_path}" in capsys.readouterr().out


@pytest.mark.wide
def test_a_signal_is_obeyed_where_the_loss_is_not_finite(tmp_path, capsys):
    """Such weights are not saved."""
    x, y = networks.data(BATCH * STEPS)
    pm = pipeline(scheme="1f1b")
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=interrupt), keras.callbacks.TerminateOnNaN()]
    with pytest.raises(KeyboardInterrupt):
        pm.fit(x * np.nan, y, BATCH, verbose=2, callbacks=[*callbacks, PipelineCheckpoint(tmp_path)])
    assert "Stopped by SIGINT after 1 step: nothing could be saved" in capsys.readouterr().out
    assert not Store(tmp_path, 3).paths()


@pytest.mark.wide
def test_an_exception_is_raised_though_a_signal_came_before(tmp_path):
    stopping = [keras.callbacks.LambdaCallback(on_train_batch_end=interrupt), Stop(1)]
    assert run(tmp_path, scheme="1f1b", callbacks=stopping)[1] is None


@pytest.mark.wide
@pytest.mark.parametrize("at", parameters.by_default([4, 19], 19))
def test_a_signal_stops_after_the_step_at_hand(at, tmp_path):
    """What is in flight is in the checkpoint, and not done before."""

    class Signal(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.steps == at:
                os.kill(os.getpid(), signal.SIGINT)

    counting = Signal()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, callbacks=[counting], every_steps=100)
    found, _ = Store(tmp_path, 3).newest()
    assert found.about["updates"] == counting.steps == at
    assert found.about["position"] == [*divmod(at, STEPS)]
    again, _ = run(tmp_path)
    assert int(again.optimizer.iterations.numpy()) == 3 * STEPS


class Training:
    """A process that trains with checkpoints in ``directory``; waits until it has begun."""

    def __init__(self, directory, **environment):
        self.result = directory / "result.npz"
        self._process = subprocess.Popen(
            [sys.executable, killed_training.__file__, str(directory / "checkpoints"), str(self.result)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in self._process.stdout:
            if line.startswith("training"):
                break

    def send(self, number):
        self._process.send_signal(number)

    def ended(self):
        """The exit status and all that was said."""
        said = self._process.communicate(timeout=280)[0]
        return self._process.returncode, said

    def weights(self):
        return saved(self.result)


def saved(path):
    with np.load(path) as found:
        return [found[name] for name in found.files]


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    """The weights of the same training without checkpoints, in this process."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(killed_training, "STEP_S", 0.0)
        killed_training.main("", folder / "result.npz")
    return saved(folder / "result.npz")


@pytest.mark.wide
@pytest.mark.parametrize("interrupted", parameters.by_default([False, True], False))
def test_a_process_that_is_killed_while_it_writes_loses_nothing(interrupted, never_stopped, tmp_path):
    """In the midst of its third checkpoint; whoever goes on may be ended at once by a second signal."""
    training = Training(tmp_path, STEP_S="0", KILL_AT="3")
    assert training.ended()[0] == -signal.SIGKILL
    found, _ = Store(tmp_path / "checkpoints", 3).newest()
    assert found.about["updates"] == 4
    if interrupted:
        training = Training(tmp_path, STEP_S="60")
        for _ in range(2):
            time.sleep(0.5)
            training.send(signal.SIGINT)
        assert training.ended()[0] == -signal.SIGINT
    training = Training(tmp_path, STEP_S="0")
    assert training.ended()[0] == 0
    networks.assert_equal(training.weights(), never_stopped)


@pytest.mark.slow
def test_killed_at_20_random_moments_ends_bitwise_as_never_killed(never_stopped, tmp_path):
    """Every fourth time in the midst of writing; whoever goes on begins at the newest checkpoint."""
    moments = random.Random(0)
    kills = completed = 0
    directory, newest = tmp_path / "0", 0
    while kills < 20:
        in_writing = {"KILL_AT": str(moments.randint(1, 3))} if kills % 4 == 3 else {}
        training = Training(directory, STEP_S="0.05", **in_writing)
        time.sleep(moments.uniform(0, 1))
        training.send(signal.SIGKILL)
        status, _ = training.ended()
        found, damaged = Store(directory / "checkpoints", 3).newest()
        assert not damaged
        step = found.about["updates"] if found else 0
        assert step >= newest
        newest = step
        kills += status == -signal.SIGKILL
        if status == 0:
            networks.assert_equal(training.weights(), never_stopped)
            completed += 1
            directory, newest = tmp_path / str(completed), 0
    training = Training(directory, STEP_S="0")
    assert training.ended()[0] == 0
    networks.assert_equal(training.weights(), never_stopped)
