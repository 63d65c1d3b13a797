"""Data parallelism by MirroredStrategy, under the same interface as the pipelines."""

from __future__ import annotations

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from networks import fit

import pipetrain


@pytest.mark.slow
def test_early_stopping_restores_the_best_weights():
    x, y = networks.data(80)
    pm, kept = networks.pipeline(scheme="data-parallel", optimizer=keras.optimizers.SGD(3.0)), []
    stop = keras.callbacks.EarlyStopping("val_loss", restore_best_weights=True)
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: kept.append((logs["val_loss"], pm.get_weights()))
    )
    fit(pm, x, y, epochs=6, validation_data=(x, y), callbacks=[keep, stop])
    networks.assert_close(pm.get_weights(), min(kept, key=lambda pair: pair[0])[1])


@pytest.mark.parametrize(
    ("width", "devices"),
    [(8, 3), pytest.param(16, 3, marks=pytest.mark.slow), pytest.param(8, 2, marks=pytest.mark.slow)],
)
def test_one_model_after_another_trains_on_batches_that_do_not_divide(width, devices):
    """The second strategy of a process met the first one's collective operations."""
    x, y = networks.data(70)
    names = [f"CPU:{n}" for n in range(devices)]
    pm = pipetrain.PipelineModel(networks.mlp(width=width), scheme="data-parallel", devices=names)
    pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy(), metrics=["accuracy"])
    history = pm.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), verbose=0).history
    assert history["loss"][1] < history["loss"][0]


def test_a_shuffled_data_set_is_read_from_its_beginning():
    """Its first batch was read before training, for its shapes: a data set that shuffles anew then began otherwise."""
    x, y = networks.data(96)
    losses = {}
    for scheme in ("single", "data-parallel"):
        model = pipetrain.PipelineModel(networks.small(), scheme=scheme, devices=("CPU:0", "CPU:1"))  # and a new seed
        model.compile(keras.optimizers.SGD(0.0), networks.crossentropy())
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=3, reshuffle_each_iteration=True)
        losses[scheme] = []
        seen = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, seen=losses[scheme]: seen.append(float(logs["loss"]))
        )
        model.fit(data.batch(16), epochs=2, verbose=0, callbacks=[seen])
    np.testing.assert_allclose(losses["data-parallel"], losses["single"], rtol=1e-5)


def test_data_parallel_equals_one_device():
    x, y = networks.data(160)
    pm = networks.pipeline(scheme="data-parallel", devices=("CPU:0", "CPU:1"))
    single = networks.mlp()
    single.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy(), metrics=["accuracy"])
    for model in (pm, single):
        model.fit(x, y, batch_size=16, shuffle=False, epochs=2, verbose=0)
    networks.assert_close(pm.get_weights(), single.get_weights())


@pytest.mark.parametrize("clips", [{"clipnorm": 0.1}, {"clipvalue": 0.01}, {"global_clipnorm": 0.1}])
def test_the_gradients_of_the_whole_minibatch_are_clipped(clips):
    x, y = networks.data(80)
    pm = networks.pipeline(scheme="data-parallel", devices=("CPU:0", "CPU:1"))
    plain = networks.mlp()
    for model in (pm, plain):
        model.compile(keras.optimizers.SGD(0.5, **clips), networks.crossentropy())
        fit(model, x, y)
    networks.assert_close(pm.get_weights(), plain.get_weights())
