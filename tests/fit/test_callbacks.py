"""Every callback that comes with Keras, in a pipeline as in plain Keras."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from unittest.mock import Mock

import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from networks import assert_alike, assert_equal, compiled, fit, fresh, without_figures

from pipetrain.frontend import input_data, runner_fit

C = keras.callbacks
X, Y = networks.data(70)  # three minibatches of 20, one of 10


def train(model, *callbacks, **settings):
    return fit(model, X, Y, **{"epochs": 3, "callbacks": list(callbacks), **settings})


def checkpoints(folder):
    """ModelCheckpoint in each of its ways."""
    steps = {"save_weights_only": True, "save_freq": 3}
    return [
        C.ModelCheckpoint(folder / "{epoch}.keras"),
        C.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
        C.ModelCheckpoint(folder / "best.keras", "loss", save_best_only=True),
        C.ModelCheckpoint(folder / "{epoch}-{batch}.weights.h5", **steps),
    ]


SAVED = ["1-3.weights.h5", "1.keras", "1.weights.h5", "2-2.weights.h5", "2.keras", "2.weights.h5", "best.keras"]


def loaded(path):
    if path.suffix == ".keras":
        return keras.models.load_model(path).get_weights()
    model = networks.small()
    model.load_weights(path)
    return model.get_weights()


@pytest.mark.wide
def test_checkpoints_hold_the_weights_of_their_moment(tmp_path):
    def saved(model):
        folder = tmp_path / type(model).__name__
        train(model, *checkpoints(folder), epochs=2)
        return {path.name: loaded(path) for path in folder.iterdir()}

    _, files = assert_alike(saved)
    assert sorted(files) == SAVED


@pytest.mark.wide
def test_checkpoints_of_an_asynchronous_pipeline(tmp_path):
    pm, kept = fresh("spectrain"), []
    keep = C.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append((logs["loss"], pm.get_weights())))
    train(pm, keep, *checkpoints(tmp_path), epochs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == SAVED
    for epoch, (_, weights) in enumerate(kept, start=1):
        assert_equal(loaded(tmp_path / f"{epoch}.keras"), weights)
        assert_equal(loaded(tmp_path / f"{epoch}.weights.h5"), weights)
    assert_equal(loaded(tmp_path / "best.keras"), min(kept, key=lambda pair: pair[0])[1])


class Interruption(C.Callback):
    """Raises KeyboardInterrupt in the middle of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self._epoch, self._now = epoch, -1

    def on_epoch_begin(self, epoch, logs=None):
        self._now = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._now, batch) == (self._epoch, 1):
            raise KeyboardInterrupt


def resumed(scheme, folder):
    """The weights a second process begins with, its epochs, and its weights in the end."""
    first, second = (compiled(scheme) for _ in range(2))
    with pytest.raises(KeyboardInterrupt):
        train(first, C.BackupAndRestore(folder), Interruption(1))
    begun, epochs = [], []
    look = C.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: (epochs.append(epoch), begun or begun.extend(second.get_weights()))
    )
    train(second, C.BackupAndRestore(folder), look)
    assert not folder.exists()
    return begun, epochs, second.get_weights()


@pytest.mark.wide
def test_an_interrupted_fit_is_resumed(tmp_path):
    want, got = (resumed(scheme, tmp_path / scheme) for scheme in ("keras", "1f1b"))
    assert got[1] == want[1] == [1, 2]
    networks.assert_close(got[0], want[0])
    networks.assert_close(got[2], want[2])


@pytest.mark.wide
def test_an_interrupted_asynchronous_fit_is_resumed(tmp_path):
    begun, epochs, _ = resumed("spectrain", tmp_path / "backup")
    first = compiled("spectrain")
    train(first, epochs=1)
    assert epochs == [1, 2]
    assert_equal(begun, first.get_weights())


def stopping():
    """Stops as if a larger loss were better: then the first epoch is the best."""
    return C.EarlyStopping("val_loss", mode="max", patience=2, restore_best_weights=True)


@pytest.mark.wide
def test_early_stopping_restores_the_best_weights():
    pm, history = assert_alike(lambda model: train(model, stopping(), epochs=6, validation_data=(X, Y)))
    assert len(history["loss"]) == 3
    restored = pm.get_weights()
    train(fresh("1f1b"), epochs=1)
    assert_equal(restored, pm.get_weights())


@pytest.mark.wide
def test_early_stopping_of_an_asynchronous_pipeline():
    pm, first = compiled("spectrain"), compiled("spectrain")
    history = train(pm, stopping(), epochs=6, validation_data=(X, Y)).history
    train(first, epochs=1)
    assert len(history["loss"]) == 3
    assert_equal(pm.get_weights(), first.get_weights())


class Halving(C.Callback):
    """Halves the learning rate after every other minibatch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch % 2:
            self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)


RATES = {  # callback, rate of each epoch's last minibatch
    "plateau": (lambda: C.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0), [0.05, 0.05, 0.025]),
    "scheduler": (lambda: C.LearningRateScheduler(lambda epoch, rate: 0.5 * rate), [0.025, 0.0125, 0.00625]),
    "own": (Halving, [0.0125, 0.003125, 0.00078125]),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", RATES)
def test_callbacks_that_change_the_learning_rate(name):
    make, rates = RATES[name]

    def rated(model):
        history = train(model, make()).history
        return {**history, "learning_rate": history.get("learning_rate", [])}, float(model.optimizer.learning_rate)

    _, (history, rate) = assert_alike(rated)
    assert history["learning_rate"] in ([], pytest.approx(rates))
    assert rate in (pytest.approx(rates[-1]), pytest.approx(rates[-1] / 2))


@pytest.mark.wide
def test_an_asynchronous_pipeline_takes_a_new_rate_between_epochs():
    make, rates = RATES["scheduler"]
    pm, apart = compiled("spectrain"), compiled("spectrain")
    train(pm, make())
    for rate in rates:
        apart.optimizer.learning_rate = rate
        train(apart, epochs=1)
    assert_equal(pm.get_weights(), apart.get_weights())


@pytest.mark.wide
def test_a_rate_is_read_with_its_minibatch_where_there_is_a_gpu(monkeypatch):
    """There a function that reads is called in another way; GPUs themselves are for ``test_gpu.py``."""
    found, make, direct = tf.config.list_logical_devices, RATES["own"][0], input_data.direct
    weights, calls = [], []
    for gpus in ({}, {"GPU": ["GPU:0"]}):
        monkeypatch.setattr(
            tf.config, "list_logical_devices", lambda kind=None, given=gpus: given.get(kind, found(kind))
        )
        counted = Mock(side_effect=direct)
        monkeypatch.setattr(input_data, "direct", counted)
        pm = compiled("spectrain")
        train(pm, make())
        weights.append(pm.get_weights())
        calls.append(counted.call_count)
    assert_equal(*weights)
    assert calls[1] < calls[0]


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["1f1b", "spectrain"])
def test_csv_logs_are_the_history(scheme, tmp_path):
    path = tmp_path / "log.csv"
    history = train(fresh(scheme), C.CSVLogger(path)).history
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2]
    for name in ("loss", "accuracy"):
        assert [float(row[name]) for row in rows] == pytest.approx(history[name])


def summaries(folder):
    """(tag, step) -> value of every summary written."""
    found = {}
    for path in sorted(Path(folder).rglob("*tfevents*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                found[f"{path.parent.name}/{value.tag}", event.step] = tf.make_ndarray(value.tensor)
    return found


@pytest.mark.wide
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")

    def written(model):
        folder = tmp_path / type(model).__name__
        board = C.TensorBoard(folder, histogram_freq=1, update_freq=2, write_graph=True)
        train(model, board, epochs=2, validation_data=(X, Y))
        found = summaries(folder)
        found.pop(("train/keras", 0), None)  # the picture of the layers, which Keras draws for its own classes only
        figures = {f"train/epoch_{name}" for name in runner_fit.NAMES}  # of a pipeline alone
        return {key: value if value.ndim == 0 else value.shape for key, value in found.items() if key[0] not in figures}

    pm, found = assert_alike(written)
    tags = {tag for tag, _ in found}
    assert {"train/epoch_loss", "train/batch_accuracy", "validation/epoch_loss"} <= tags
    assert {f"train/{weight.path}/histogram" for weight in pm.weights} <= tags
    assert {step for tag, step in found if tag == "train/batch_loss"} == {2, 4, 6, 8}


@pytest.mark.wide
def test_tensorboard_of_an_asynchronous_pipeline(tmp_path):
    pytest.importorskip("tensorboard")
    pm = fresh("spectrain")
    losses = train(pm, C.TensorBoard(tmp_path, histogram_freq=1, update_freq=1)).history["loss"]
    found = summaries(tmp_path)
    assert [float(found["train/epoch_loss", epoch]) for epoch in range(3)] == pytest.approx(losses)
    for weight in pm.weights:  # rows of a histogram: from, to, how many
        assert found[f"train/{weight.path}/histogram", 2][:, 2].sum() == np.prod(weight.shape)
        assert found[f"train/{weight.path}/histogram", 2][0, 0] == pytest.approx(np.min(weight))


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["keras", "1f1b", "spectrain"])
def test_terminate_on_nan(scheme):
    x, steps = X.copy(), []
    x[25] = np.nan
    count = C.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    model = compiled(scheme)
    history = fit(model, x, Y, epochs=3, callbacks=[C.TerminateOnNaN(), count])
    assert steps == [0, 1]
    assert len(history.epoch) == 1
    assert model.stop_training


MOMENTS = ("on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end")


def test_every_moment_of_a_lambda_callback():
    def moments(model):
        calls = {}

        def note(name):
            def called(*arguments, **moment):  # the logs alone, or a number before them
                given = [without_figures(each) if isinstance(each, dict) else each for each in arguments]
                calls[len(calls), name] = (given, moment)

            return called

        train(model, C.LambdaCallback(**{name: note(name) for name in (*MOMENTS, "on_train_end")}), epochs=2)
        return calls

    _, calls = assert_alike(moments)
    assert len(calls) == 2 + 2 * (2 + 2 * 4)


@pytest.mark.wide
def test_every_moment_of_an_asynchronous_pipeline():
    steps = []
    train(
        fresh("spectrain"),
        C.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: steps.append(batch),
            on_train_batch_end=lambda batch, logs: steps.append((batch, sorted(logs))),
        ),
        epochs=1,
    )
    assert steps == [step for batch in range(4) for step in (batch, (batch, ["accuracy", "loss"]))]


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["1f1b", "spectrain"])
def test_remote_monitor(scheme, monkeypatch):
    sent = []
    requests = pytest.importorskip("requests")
    monkeypatch.setattr(requests, "post", lambda url, data, headers: sent.append((url, json.loads(data["data"]))))
    history = train(fresh(scheme), C.RemoteMonitor("http://nowhere")).history
    assert [url for url, _ in sent] == ["http://nowhere/publish/epoch/end/"] * 3
    assert [data["epoch"] for _, data in sent] == [0, 1, 2]
    for name in ("loss", "accuracy"):
        assert [data[name] for _, data in sent] == pytest.approx(history[name])


@pytest.mark.parametrize("scheme", ["data-parallel", "1f1b", "spectrain"])
def test_swapping_averaged_weights_is_refused(scheme):
    pm = fresh(scheme)
    before = pm.get_weights()
    with pytest.raises(ValueError, match=r"no averages of weights.*callbacks with SwapEMAWeights.*Try"):
        train(pm, C.SwapEMAWeights())
    assert_equal(pm.get_weights(), before)
    assert int(pm.optimizer.iterations.numpy()) == 0


@pytest.mark.parametrize("scheme", ["1f1b", "spectrain"])
def test_orbax_checkpoints(scheme, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    model = fresh(scheme)
    train(model, C.OrbaxCheckpoint(tmp_path, save_freq="epoch"))
    assert {path.name for path in tmp_path.iterdir()} >= {"2"}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "call"), parameters.combinations(["spectrain", "1f1b"], ["evaluate", "get_metrics_result"])
)
def test_evaluating_in_a_batch_callback_does_not_end_the_epoch(scheme, call):
    x, y = networks.data(200)
    pm, steps = networks.pipeline(scheme=scheme), []

    def look(batch, logs):
        steps.append(batch)
        if batch == 3:
            pm.evaluate(x, y, verbose=0) if call == "evaluate" else pm.get_metrics_result()

    fit(pm, x, y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=look)])
    assert steps == list(range(10))
    assert int(pm.optimizer.iterations) == 10
