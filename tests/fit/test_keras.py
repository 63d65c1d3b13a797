"""What Keras users do, done with a PipelineModel."""

from __future__ import annotations

import subprocess
import sys

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf

import pipetrain
from pipetrain.schemes.table import NAMES, SCHEMES

BATCH = 16
L = keras.layers


def plain(optimizer, seed=0):
    model = networks.mlp(seed=seed)
    model.compile(optimizer, loss=networks.crossentropy(), metrics=["accuracy"])
    return model


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(NAMES, "spectrain"))
def test_every_scheme_learns(scheme):
    x, y = networks.data(640)
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    devices = ("CPU:0", "CPU:1") if scheme == "data-parallel" else None  # whose every replica is slow
    pm = networks.pipeline(optimizer=optimizer, scheme=scheme, devices=devices)
    history = pm.fit(x, y, batch_size=BATCH, epochs=4, verbose=0, validation_data=(x, y)).history
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert history["val_accuracy"][-1] > 0.6
    assert pm.evaluate(x, y, verbose=0, return_dict=True)["accuracy"] == pytest.approx(history["val_accuracy"][-1])
    np.testing.assert_allclose(pm.predict(x, verbose=0), pm.model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


OPTIMIZERS = {
    "plain": lambda: keras.optimizers.SGD(0.05),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "decay": lambda: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01),
    "clipped": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.5), momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", parameters.by_default(OPTIMIZERS, "clipped", "adam"))
def test_optimizers_equal_plain_keras(name):
    x, y = networks.data(10 * BATCH)
    pm = networks.pipeline(optimizer=OPTIMIZERS[name](), scheme="1f1b", microbatches=2, cuts=networks.cuts(6, 2))
    single = plain(OPTIMIZERS[name]())
    for model in (pm, single):
        model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    networks.assert_close(pm.get_weights(), single.get_weights(), 2e-5)
    assert int(pm.optimizer.iterations.numpy()) == 20


@pytest.mark.wide
def test_learning_rates_travel_with_the_minibatch():
    def warm(epoch, rate):
        return 0.01 * (epoch + 1)

    x, y = networks.data(6 * BATCH)
    pm = networks.pipeline(scheme="gpipe")
    single = plain(keras.optimizers.SGD(0.05, momentum=0.9))
    for model in (pm, single):
        schedule = keras.callbacks.LearningRateScheduler(warm)
        model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=3, verbose=0, callbacks=[schedule])
    networks.assert_close(pm.get_weights(), single.get_weights())


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(SCHEMES, "spectrain"))
def test_logs_are_those_of_their_own_minibatch(scheme):
    """With a learning rate of zero every loss is known beforehand, so the running means are too."""
    x, y = networks.data(7 * BATCH + 3)
    pm = networks.pipeline(optimizer=keras.optimizers.SGD(0.0, momentum=0.9), scheme=scheme)
    single = plain(keras.optimizers.SGD(0.0))
    logs = {"pm": [], "single": []}
    for name, model in (("pm", pm), ("single", single)):
        keep = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, to=logs[name]: to.append(dict(logs))
        )
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[keep])
    assert len(logs["pm"]) == 8
    for got, want in zip(logs["pm"], logs["single"]):
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.wide
def test_an_epoch_s_metrics_are_of_all_its_minibatches():
    x, y = networks.data(20 * BATCH)
    losses = []
    pm = networks.pipeline()

    def stop(batch, logs):
        losses.append(logs["loss"])
        pm.stop_training = batch == 9

    history = pm.fit(
        x, y, batch_size=BATCH, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    )
    trained = {span.microbatch for span in pm.trace.spans if span.op == "B"}
    assert len(losses) == 10
    assert trained == set(range(min(20, 10 + inside.runner(pm).window - 1)))  # what was in flight was finished
    assert np.isfinite(history.history["loss"][0])


@pytest.mark.parametrize("steps", [pytest.param(None, marks=pytest.mark.wide), 5])
def test_generators_and_datasets(steps):
    x, y = networks.data(8 * BATCH)

    def source():
        for first in range(0, len(x), BATCH):
            yield x[first : first + BATCH], y[first : first + BATCH]

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    results = []
    for data in (source(), dataset, *([dataset.repeat()] if steps else [])):
        pm = networks.fresh("vanilla")
        pm.fit(data, steps_per_epoch=steps, verbose=0, shuffle=False)
        results.append(pm.get_weights())
    for other in results[1:]:
        networks.assert_equal(results[0], other)


def test_an_endless_data_set_is_not_read_beyond_the_epoch():
    read = []

    def source():
        x, y = networks.data(BATCH)
        while True:
            read.append(1)
            yield x, y

    dataset = tf.data.Dataset.from_generator(
        source, output_signature=(tf.TensorSpec([BATCH, networks.FEATURES]), tf.TensorSpec([BATCH], tf.int32))
    )
    pm = networks.pipeline()
    history = pm.fit(dataset, steps_per_epoch=6, epochs=3, verbose=0)
    assert len(history.history["loss"]) == 3
    assert sum(span.op == "F" and span.stage == 0 for span in pm.trace.spans) == 18


def test_an_epoch_of_so_many_steps_leaves_the_next_one_its_data():
    x, y = networks.data(6 * BATCH)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    results = []
    for settings in ({}, {"steps_per_epoch": 3, "epochs": 2}, {"steps_per_epoch": 1, "epochs": 6}):
        pm = networks.fresh("1f1b")
        pm.fit(dataset, verbose=0, shuffle=False, **settings)
        assert int(pm.optimizer.iterations.numpy()) == 6
        results.append(pm.get_weights())
    for other in results[1:]:
        networks.assert_equal(results[0], other)


@pytest.mark.wide
def test_sample_and_class_weights():
    x, y = networks.data(6 * BATCH)
    weights = np.linspace(0.1, 2, len(x)).astype("float32")
    pm = networks.pipeline(scheme="1f1b", microbatches=3)
    single = plain(keras.optimizers.SGD(0.05, momentum=0.9))
    for model in (pm, single):
        model.fit(x, y, sample_weight=weights, batch_size=BATCH, shuffle=False, verbose=0)
        model.fit(
            x, y, class_weight={0: 2.0, 1: 0.5, 2: 1.0, 3: 1.0, 4: 3.0}, batch_size=BATCH, shuffle=False, verbose=0
        )
    networks.assert_close(pm.get_weights(), single.get_weights())


@pytest.mark.wide
def test_a_summed_loss():
    x, y = networks.data(4 * BATCH)
    results = []
    for make in (
        lambda m: pipetrain.PipelineModel(m, cuts=networks.cuts(6, 4), scheme="gpipe", microbatches=3),
        lambda m: m,
    ):
        model = make(networks.mlp())
        model.compile(keras.optimizers.SGD(0.001), loss=networks.crossentropy(reduction="sum"))
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        results.append(model.get_weights())
    networks.assert_close(*results)


@pytest.mark.wide
def test_state_and_regularizers_equal_the_unsplit_model():
    """BatchNorm, Dropout, weight penalties, constraints and frozen layers, one microbatch: exactly plain Keras."""

    def make():
        keras.utils.set_random_seed(5)
        layers = [
            L.Dense(16, kernel_regularizer="l2", name="a"),
            L.BatchNormalization(),
            L.ReLU(),
            L.Dropout(0.3, seed=1),
            L.Dense(16, activation="tanh", trainable=False, name="b"),
            L.Dense(
                networks.CLASSES, kernel_regularizer="l1", kernel_constraint=keras.constraints.MaxNorm(0.5), name="c"
            ),
        ]
        return keras.Sequential([keras.Input((networks.FEATURES,)), *layers])

    x, y = networks.data(8 * BATCH)
    single = make()
    single.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=networks.crossentropy(), metrics=["accuracy"])
    pm = networks.pipeline(make(), scheme="1f1b", cuts=("a", "b"), microbatches=1)
    histories = [
        model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0).history for model in (single, pm)
    ]
    networks.assert_close(pm.get_weights(), single.get_weights())
    assert histories[1]["loss"] == pytest.approx(histories[0]["loss"], rel=1e-5)


@pytest.mark.wide
def test_embeddings_and_recurrence():
    def make():
        keras.utils.set_random_seed(2)
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                L.Embedding(20, 8, name="e"),
                L.LSTM(7, name="r"),
                L.Dense(networks.CLASSES),
            ]
        )

    x = np.random.default_rng(0).integers(0, 20, (6 * BATCH, 6)).astype("int32")
    y = (x.sum(axis=1) % networks.CLASSES).astype("int32")
    single = make()
    single.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=networks.crossentropy())
    pm = networks.pipeline(make(), scheme="gpipe", cuts=("e", "r"), microbatches=3)
    for model in (single, pm):
        model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    networks.assert_close(pm.get_weights(), single.get_weights())


@pytest.mark.wide
def test_stages_may_share_a_device():
    x, y = networks.data(6 * BATCH)
    results = []
    for devices in (("CPU:0",), ("CPU:0", "CPU:1"), ("CPU:0", "CPU:1", "CPU:2")):
        pm = networks.pipeline(devices=devices)
        pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        results.append(pm.get_weights())
    networks.assert_equal(results[0], results[1])
    networks.assert_equal(results[0], results[2])


@pytest.mark.wide
def test_saved_models_need_no_pipetrain(tmp_path):
    x, y = networks.data(64)
    pm = networks.pipeline()
    pm.fit(x, y, batch_size=16, verbose=0)
    pm.save(tmp_path / "m.keras")
    np.save(tmp_path / "x.npy", x)
    code = (
        "import sys, keras, numpy as np; m = keras.models.load_model('m.keras');"
        "np.save('y.npy', m.predict(np.load('x.npy'), verbose=0)); assert 'pipetrain' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), pm.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    pm.save_weights(tmp_path / "w.weights.h5")
    other = networks.pipeline(networks.mlp(seed=9))
    other.load_weights(tmp_path / "w.weights.h5")
    networks.assert_equal(other.get_weights(), pm.get_weights())


@pytest.mark.parametrize("scheme", ["spectrain", "data-parallel"])
def test_weights_are_the_wrapped_model_s(scheme):
    model = networks.mlp()
    pm = networks.pipeline(model, scheme=scheme)
    networks.assert_equal(pm.get_weights(), model.get_weights())
    new = [weight + 1 for weight in model.get_weights()]
    pm.set_weights(new)
    networks.assert_equal(model.get_weights(), new)
    model.set_weights([weight * 0 for weight in new])
    networks.assert_equal(pm.get_weights(), model.get_weights())
    assert pm.count_params() == model.count_params()


def test_train_on_batch_drains():
    x, y = networks.data(32)
    pm = networks.pipeline(optimizer=keras.optimizers.SGD(0.05), scheme="vanilla")
    single = plain(keras.optimizers.SGD(0.05))
    for _ in range(3):
        got = pm.train_on_batch(x, y, return_dict=True)
        want = single.train_on_batch(x, y, return_dict=True)
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    networks.assert_close(pm.get_weights(), single.get_weights())


@pytest.mark.wide
def test_callbacks_that_save_and_restore(tmp_path):
    x, y = networks.data(320)
    pm = networks.pipeline()
    best = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="loss", save_best_only=True)
    every = keras.callbacks.ModelCheckpoint(tmp_path / "{batch}.keras", save_freq=7)
    early = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
    pm.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[best, every, early])
    loaded = keras.models.load_model(tmp_path / "best.keras")
    networks.assert_equal(loaded.get_weights(), pm.get_weights())
    assert len(list(tmp_path.glob("*.keras"))) > 1


@pytest.mark.wide
def test_terminate_on_nan_is_left_to_its_work():
    x, y = networks.data(192)
    x[5 * BATCH : 6 * BATCH] = np.nan
    pm = networks.pipeline()
    history = pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert pm.stop_training
    assert len(history.history["loss"]) <= 1


def test_the_unused_public_names_exist():
    assert set(pipetrain.__all__) <= {name for name in pipetrain.__all__ if getattr(pipetrain, name) is not None}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pipetrain.nothing
