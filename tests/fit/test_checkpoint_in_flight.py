"""Checkpoints of a pipeline that does not flush hold what is in flight: the weights are those of a run without any."""

from __future__ import annotations

import os
import signal
import time

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from checkpointed import Stop, model
from orders import by_twos

from pipetrain.callbacks import PipelineCheckpoint, Snapshots
from pipetrain.checkpoint.state import array_of, tensor_of
from pipetrain.checkpoint.store import Store
from pipetrain.checkpoint.writer import Pace
from pipetrain.frontend.flight import Unwritable, nested, plain
from pipetrain.frontend.pipeline_strategy import PipelineStrategy
from pipetrain.run.course_runner import CourseRunner
from pipetrain.schemes.policies import VanillaPolicy
from pipetrain.schemes.schedules import Schedule
from pipetrain.schemes.scheme import Scheme

BATCH, STEPS, EPOCHS = 8, 41, 2  # the last minibatch of an epoch has fewer rows
ROWS = BATCH * (STEPS - 1) + 3
L = keras.layers


def twice(microbatch, stage, stages, microbatches):
    return microbatch // microbatches // 2 * 2


def words():
    """An embedding, whose gradients are slices, and a recurrent layer, whose residuals are lists of tensors."""
    keras.utils.set_random_seed(0)
    first = [keras.Input((6,), dtype="int32"), L.Embedding(20, 6), L.LSTM(6)]
    return keras.Sequential([*first, L.Dense(8, "tanh"), L.Dense(networks.CLASSES)])


def half():
    """Its activations are bfloat16, which NumPy does not know."""
    keras.utils.set_random_seed(0)
    layers = [L.Dense(8, "tanh", dtype="mixed_bfloat16") for _ in range(4)]
    return keras.Sequential([keras.Input((networks.FEATURES,)), *layers, L.Dense(networks.CLASSES, dtype="float32")])


def wide():
    """Of weights' gradients their factors are in flight, which are fewer bytes."""
    keras.utils.set_random_seed(0)
    layers = [L.Dense(40, "tanh") for _ in range(3)]
    return keras.Sequential([keras.Input((networks.FEATURES,)), *layers, L.Dense(networks.CLASSES)])


def penalized():
    """With an L2 penalty, which goes down with activations, and state, in replicas."""
    keras.utils.set_random_seed(0)
    layers = [L.Dense(8, "tanh", kernel_regularizer="l2"), L.BatchNormalization(), L.Dropout(0.2, seed=1)]
    return keras.Sequential([keras.Input((networks.FEATURES,)), *layers, L.Dense(8), L.Dense(networks.CLASSES)])


def adam():
    return keras.optimizers.Adam(0.01)


def adamw():
    return keras.optimizers.AdamW(0.01, weight_decay=0.1)


def nadam():
    return keras.optimizers.Nadam(0.01)


def decaying():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.9), momentum=0.9)


class Rates(keras.callbacks.Callback):
    """Another learning rate after every step."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.05 / (1 + batch % 9)


OWN = Scheme("by twos", Schedule(by_twos, flushes=False, found=twice), VanillaPolicy())
TIED = {"make": networks.tied_autoencoder, "cuts": networks.cuts(6, 4)}
WAYS = {
    "spectrain": {},
    "spectrain, tied": {**TIED, "calls_of": 2},
    "spectrain, tied, adam": {**TIED, "optimizer": adam, "calls_of": 1},
    "spectrain, local": {"horizon": "local", "optimizer": adamw, "calls_of": 3},
    "spectrain, target": {"horizon": "target", "microbatches": 2, "optimizer": nadam, "calls_of": 2},
    "spectrain, replicas": {"make": penalized, "stages": 2, "replicas": (2, 1), "calls_of": 2},
    "spectrain, many replicas": {"make": penalized, "stages": 3, "replicas": (1, 3, 2), "calls_of": 1},
    "spectrain, spikes": {"spike_compensation": True, "calls_of": 2},
    "spectrain, rescaled": {"rescale_steps": 20, "calls_of": 2},
    "spectrain, schedule": {"optimizer": decaying, "calls_of": 2},
    "spectrain, xla": {"jit_compile": True, "calls_of": 2},
    "vanilla": {"scheme": "vanilla"},
    "vanilla, words": {"scheme": "vanilla", "make": words, "calls_of": 2},
    "vanilla, bfloat16": {"scheme": "vanilla", "make": half, "calls_of": 2},
    "weight-stashing": {"scheme": "weight-stashing", "optimizer": adam, "calls_of": 2},
    "weight-stashing, tied": {**TIED, "scheme": "weight-stashing", "calls_of": 3},
    "weight-stashing, recompute": {"scheme": "weight-stashing", "recompute": True, "calls_of": 2},
    "vertical-sync": {"scheme": "vertical-sync", "calls_of": 1},
    "2bw": {"scheme": "2bw", "microbatches": 3, "calls_of": 2},
    "2bw, predicted": {"scheme": "2bw", "microbatches": 3, "horizon": 1.5, "calls_of": 3},
    "2bw, tied": {**TIED, "scheme": "2bw", "microbatches": 4, "calls_of": 1},
    "2bw, products": {"scheme": "2bw", "microbatches": 3, "make": wide, "calls_of": 2},
    "spectrain, products": {"horizon": "target", "microbatches": 2, "make": wide, "calls_of": 1},
    "an order of one's own": {"scheme": OWN, "calls_of": 2},
}
SYNCHRONOUS = {
    "1f1b, replicas": {"scheme": "1f1b", "make": penalized, "stages": 2, "replicas": (2, 1), "microbatches": 2},
    "gpipe": {"scheme": "gpipe", "microbatches": 2, "optimizer": nadam},
    "single": {"scheme": "single", "stages": 1},
    "zb-v": {"scheme": "zb-v", "stages": 4, "make": networks.mlp, "microbatches": 4},
}


@pytest.fixture
def train(monkeypatch):
    """``train(folder, every_steps)``: the model, its History (None if it was stopped), and what snapshots have seen."""

    def trained(
        folder=None,
        every_steps=1,
        stop_after=None,
        make=model,
        optimizer=None,
        calls_of=None,
        callbacks=(),
        jit_compile=False,
        **settings,
    ):
        if calls_of is not None:
            monkeypatch.setattr(PipelineStrategy, "_minibatches_at_once", lambda self: calls_of)
            monkeypatch.setattr(PipelineStrategy, "_kind_of_runner", lambda self: CourseRunner)
        keras.utils.set_random_seed(0)
        if "cuts" not in settings:
            settings.setdefault("stages", 3)
        pm, seen = networks.in_way(make(), **settings), {}
        is_tied = make is networks.tied_autoencoder
        loss = "mse" if is_tied else networks.crossentropy()
        optimizer = optimizer() if optimizer else keras.optimizers.SGD(0.05, momentum=0.9)
        pm.compile(optimizer, loss, metrics=[] if is_tied else ["accuracy"], jit_compile=jit_compile)
        x, y = networks.data(ROWS)
        if make is words:
            x = np.abs(x[:, :6] * 7).astype("int32") % 20
        looks = Snapshots(7, lambda step, looked: seen.__setitem__(step, looked.get_weights()))
        saving = [PipelineCheckpoint(folder, every_steps=every_steps)] if folder else []
        stops = [Stop(stop_after)] if stop_after else []
        given = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
        try:
            found = pm.fit(x, x if is_tied else y, callbacks=[looks, *callbacks, *saving, *stops], **given)
        except InterruptedError:
            return pm, None, seen
        return pm, found.history, seen

    return trained


def assert_same(found, wanted):
    """Weights, the losses of epochs that both have, and what was seen of weights in between."""
    (pm, history, seen), (other, whole, known) = found, wanted
    networks.assert_equal(pm.get_weights(), other.get_weights())
    assert int(pm.optimizer.iterations) == int(other.optimizer.iterations) == EPOCHS * STEPS
    for name, values in networks.without_figures(history).items():
        np.testing.assert_allclose(values, whole[name][-len(values) :], rtol=1e-6)
    assert seen.keys() <= known.keys()
    for step, weights in seen.items():
        networks.assert_equal(weights, known[step])


# Those that differ in what is in flight; all others are slow tests.
WIDE = ("spectrain, tied, adam", "spectrain, target", "spectrain, replicas", "spectrain, xla", "vanilla, words")
WIDE += ("weight-stashing, recompute", "vertical-sync", "2bw, tied", "1f1b, replicas", "spectrain, products")


@pytest.mark.parametrize("way", parameters.by_default([*WAYS, *SYNCHRONOUS], "spectrain", wide=WIDE))
def test_weights_are_those_of_a_run_without_checkpoints(way, train, tmp_path):
    """Stopped in the first epoch, where some minibatches are in flight, and gone on with checkpoints at all steps."""
    settings = {**WAYS, **SYNCHRONOUS}[way]
    whole = train(**settings)
    *_, before = train(tmp_path, every_steps=7, stop_after=18, **settings)
    found, damaged = Store(tmp_path, 3).newest()
    assert not damaged and found.about["updates"] == 14
    in_flight = found.about["in_flight"]["left"] if inside.is_program(whole[0]) else None
    assert (in_flight is not None) is (way in WAYS)
    pm, history, after = train(tmp_path, every_steps=1, **settings)
    assert_same((pm, history, before | after), whole)
    assert {*before, *after} == {*whole[2]}


@pytest.mark.wide
@pytest.mark.parametrize("way", ["spectrain", "2bw"])
def test_weights_are_the_same_however_many_checkpoints_there_are(way, train, tmp_path):
    whole = train(**WAYS[way])
    for every_steps in (1, 7, 100):
        assert_same(train(tmp_path / str(every_steps), every_steps=every_steps, **WAYS[way]), whole)


STOPS = [2, 3, 5, 11, 38, 39, 40, 41, 42, 44, 81]


@pytest.mark.parametrize(
    "stops", [pytest.param([5, 81], marks=pytest.mark.wide), pytest.param(STOPS, marks=pytest.mark.slow)]
)
def test_stopped_after_any_minibatch_a_run_goes_on_as_never_stopped(stops, train, tmp_path):
    """At the beginning, where the pipeline fills, and at the end of the data, where no call has all its minibatches."""
    settings = {"make": networks.mlp, "cuts": networks.cuts(6, 4), "scheme": "weight-stashing", "calls_of": 3}
    whole = train(**settings)
    for each in stops:
        train(tmp_path / str(each), stop_after=each, **settings)
        assert_same(train(tmp_path / str(each), **settings), whole)


class Counting(keras.callbacks.Callback):
    """Gives checkpoints the very list that it goes on with."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(batch)

    def get_state(self):
        return {"steps": self.steps}

    def set_state(self, state):
        self.steps = state["steps"]


def test_what_callbacks_know_is_that_of_the_step_though_it_is_written_later(train, tmp_path, monkeypatch):
    write = Store.write

    def late(self, *given):
        time.sleep(0.1)
        return write(self, *given)

    monkeypatch.setattr(Store, "write", late)
    train(tmp_path, every_steps=7, calls_of=2, stop_after=30, callbacks=[Counting()])
    found = Store(tmp_path, 3).newest()[0].about
    (known,) = (each for each in found["callbacks"].values() if isinstance(each, dict) and "steps" in each)
    assert len(known["steps"]) == found["updates"]


@pytest.mark.wide
def test_learning_rates_take_effect_at_the_same_minibatches(train, tmp_path):
    """Those of minibatches that had been posted and not gone in are read again, and keep the rate that they had."""

    whole = train(callbacks=[Rates()])
    train(tmp_path, every_steps=1, stop_after=22, callbacks=[Rates()])
    assert_same(train(tmp_path, every_steps=5, callbacks=[Rates()]), whole)


@pytest.mark.wide
def test_by_a_signal_a_run_is_stopped_as_it_is(train, tmp_path):
    """What is in flight is not done before, so that the run that goes on is as never stopped."""
    whole = train()
    seen = []

    def look(batch, logs):
        seen.append(batch)
        if len(seen) == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        train(tmp_path, every_steps=1000, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=look)])
    assert len(seen) == 20 and Store(tmp_path, 3).newest()[0].about["updates"] == 20
    assert_same(train(tmp_path, every_steps=1000), whole)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"stages": 2}, marks=pytest.mark.wide),
        pytest.param({"scheme": "vanilla"}, marks=pytest.mark.wide),
        pytest.param({"scheme": "1f1b", "microbatches": 1}, marks=pytest.mark.wide),
        pytest.param({"optimizer": adam}, marks=pytest.mark.wide),
        pytest.param({"horizon": "target"}, marks=pytest.mark.wide),
        pytest.param({"recompute": True}, marks=pytest.mark.wide),
    ],
    ids=lambda other: next(iter(other)),
)
def test_trained_otherwise_a_run_goes_on_without_what_was_in_flight(other, train, tmp_path):
    train(tmp_path, stop_after=20)
    pm, history, _ = train(tmp_path, **other)
    found = Store(tmp_path, 3).newest()[0].about
    assert int(pm.optimizer.iterations) == found["updates"] == EPOCHS * STEPS and found["position"] == [EPOCHS, 0]
    assert np.isfinite(history["loss"]).all()


class Seen(keras.callbacks.Callback):
    """Every step, with the counter of updates and the rate of the next one; and the rows of every epoch's metrics."""

    def __init__(self):
        super().__init__()
        self.steps, self.rows, self._epoch = [], [], 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        made = int(optimizer.iterations)
        self.steps.append((self._epoch, batch, made, float(optimizer.learning_rate)))

    def on_epoch_end(self, epoch, logs=None):
        self.rows += [float(metric.count) for metric in self.model.metrics if metric.name == "loss"]


# Another layout for each way in flight: other cuts, which no tensor in flight fits.
OTHERWISE = {name: {"cuts": networks.cuts(6, 3)} if "tied" in name else {"stages": 2} for name in WAYS}
OTHERWISE |= {
    "spectrain, replicas": {"replicas": (1, 2)},
    "spectrain, many replicas": {"stages": 2, "replicas": (1, 2)},
}
ONCE = ("spectrain", "spectrain, tied, adam", "spectrain, schedule", "2bw", "vanilla, words")


@pytest.mark.parametrize("way", parameters.by_default(WAYS, wide=ONCE))
def test_in_another_layout_every_step_is_seen_once(way, train, tmp_path):
    """Though stages had come further: with the updates and the rate that it has in a run that nobody stopped."""
    whole, before, after = Seen(), Seen(), Seen()
    train(callbacks=[whole], **WAYS[way])
    train(tmp_path, stop_after=20, callbacks=[before], **WAYS[way])
    found = Store(tmp_path, 3).newest()[0].about
    assert found["in_flight"]["left"] is not None
    done = found["updates"]
    train(tmp_path, callbacks=[after], **{**WAYS[way], **OTHERWISE[way]})
    assert before.steps[:done] + after.steps == whole.steps
    assert after.rows == whole.rows == [ROWS] * EPOCHS


@pytest.mark.wide
def test_what_is_left_out_is_said(train, tmp_path, capsys):
    train(tmp_path, stop_after=20)
    pm = networks.in_way(model(), stages=2)
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy(), metrics=["accuracy"])
    pm.fit(*networks.data(ROWS), batch_size=BATCH, verbose=2, callbacks=[PipelineCheckpoint(tmp_path)])
    said = capsys.readouterr().out
    assert "Different now: 2 stages instead of 3." in said and "What was in flight is left out" in said


@pytest.mark.wide
def test_large_minibatches_are_in_calls_of_functions_too_where_there_are_checkpoints(train, tmp_path, monkeypatch):
    """By themselves they are by threads, with the same weights."""
    monkeypatch.setattr(PipelineStrategy, "_minibatches_at_once", lambda self: 1)

    whole = train(callbacks=[Rates()])
    assert not inside.is_program(whole[0])
    train(tmp_path, every_steps=4, stop_after=22, callbacks=[Rates()])
    again = train(tmp_path, every_steps=9, callbacks=[Rates()])
    assert inside.is_program(again[0])
    assert_same(again, whole)


@pytest.mark.wide
def test_threads_drain_for_a_checkpoint(train, tmp_path, monkeypatch):
    """Of what their stages are at there is no list: as often as checkpoints come, the run is the same."""
    inside.by_threads(monkeypatch)
    whole = train(tmp_path / "whole", every_steps=6)
    assert "in_flight" not in Store(tmp_path / "whole", 3).newest()[0].about
    train(tmp_path / "cut", every_steps=6, stop_after=20)
    assert_same(train(tmp_path / "cut", every_steps=6), whole)


def test_as_often_as_costs_little(train, tmp_path):
    pm, *_ = train(tmp_path, every_steps="auto", calls_of=2)
    assert Store(tmp_path, 3).newest()[0].about["updates"] == int(pm.optimizer.iterations)


def test_the_pace_is_a_hundredth_or_young_s_interval():
    now_s = [0.0]
    pace, rare = (Pace(each, now_s=lambda: now_s[0]) for each in (None, 200.0))
    assert pace.interval_s == 1.0 and not pace.is_due
    now_s[0] = 1.0
    assert pace.is_due
    for each in (pace, rare):
        each.begun()
        each.ended(0.25)
    assert pace.interval_s == 25.0 and rare.interval_s == 10.0 and not pace.is_due
    now_s[0] = 26.0
    assert pace.is_due


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), True, "1"])
def test_impossible_times_between_failures_are_refused(value, tmp_path):
    with pytest.raises(ValueError, match=f"failures_every_s={value!r}.*Try"):
        PipelineCheckpoint(tmp_path, every_steps="auto", failures_every_s=value)
    with pytest.raises(ValueError, match=r"every_steps=100. Try every_steps='auto'"):
        PipelineCheckpoint(tmp_path, failures_every_s=5.0)


def test_nested_values_are_written_and_read():
    tensors = []
    spec = tf.IndexedSlicesSpec([None, 3], tf.float32, tf.int64, None, [None])
    pack = tf.raw_ops.OptionalFromValue(components=[tf.constant([1.0]), tf.constant([2], tf.int64)])
    value = {
        ("F", 1, 0, -2): [tf.constant([1.5, 2.5], tf.bfloat16), None],
        3: (spec, tf.TensorSpec([None, 2]), tf.TensorSpec(None, tf.variant), 0.1, "text", True),
        "pack": pack,
    }
    written = plain(value, tensors)
    arrays = [array_of(each) for each in tensors]
    read = nested(written, lambda number, dtype, device: tensor_of(arrays[number], dtype))
    assert list(read) == list(value) and read[3] == value[3]
    (half, none), unpacked = read["F", 1, 0, -2], read["pack"]
    assert half.dtype == tf.bfloat16 and half.numpy().tolist() == [1.5, 2.5] and none is None
    types, shapes = [tf.float32, tf.int64], [[1], [1]]
    values = tf.raw_ops.OptionalGetValue(optional=unpacked, output_types=types, output_shapes=shapes)
    assert [each.numpy().tolist() for each in values] == [[1.0], [2]]
    for unknown in (object(), tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0).resource_handle):
        with pytest.raises(Unwritable):
            plain(unknown, [])
