"""An asynchronous pipeline in calls of functions: what is in flight goes from call to call, however these are cut."""

from __future__ import annotations

import inside
import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from orders import by_twos

import pipetrain
from pipetrain.compute.graph.blocks import Chain
from pipetrain.frontend.pipeline_strategy import PipelineStrategy, minibatches_of_call
from pipetrain.run.course_runner import CourseRunner
from pipetrain.schemes.policies import VanillaPolicy, WeightStashingPolicy
from pipetrain.schemes.schedules import Schedule
from pipetrain.schemes.scheme import Scheme

BATCH = 8
ROWS = 13 * BATCH + 3


def twice(microbatch, stage, stages, microbatches):
    return microbatch // microbatches // 2 * 2


OWN = Scheme("by twos", Schedule(by_twos, flushes=False, found=twice), VanillaPolicy())


def in_calls_of(count, patch):
    """A call has so many minibatches, whatever they take."""
    patch.setattr(PipelineStrategy, "_minibatches_at_once", lambda self: count)
    patch.setattr(PipelineStrategy, "_kind_of_runner", lambda self: CourseRunner)


def trained(make, settings, jit_compile=False):
    """The weights after two epochs and the losses of these; minibatches are in flight between the two."""
    keras.utils.set_random_seed(3)
    model = make()
    pm = networks.pipeline(model, keras.optimizers.SGD(0.05, momentum=0.9), jit_compile=jit_compile, **settings)
    x, y = networks.data(ROWS)
    y = x.argmax(axis=1).astype("int32") if make is networks.tied_autoencoder else y
    history = pm.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return [*pm.get_weights(), np.array(history["loss"])], pm


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"scheme": "spectrain", "make": networks.tied_autoencoder, "count": 2}, marks=pytest.mark.wide),
        pytest.param({"scheme": "spectrain", "make": networks.tied_autoencoder, "count": 1}, marks=pytest.mark.wide),
        pytest.param({"scheme": OWN, "count": 1}, marks=pytest.mark.wide),
        pytest.param({"scheme": "weight-stashing", "count": 1}, marks=pytest.mark.wide),
        pytest.param({"scheme": "2bw", "replicas": (1, 2, 1, 1), "count": 2}, marks=pytest.mark.wide),
        pytest.param({"scheme": "spectrain", "make": networks.tied_autoencoder, "count": 3}, marks=pytest.mark.wide),
        pytest.param({"scheme": "vertical-sync", "count": 3, "jit_compile": True}, marks=pytest.mark.wide),
        pytest.param(
            {"scheme": "vanilla", "microbatches": None, "recompute": True, "count": 2}, marks=pytest.mark.wide
        ),
        pytest.param({"scheme": OWN._replace(policy=WeightStashingPolicy()), "count": 3}, marks=pytest.mark.wide),
    ],
    ids=lambda given: f"{given['scheme']}-{given['count']}",
)
def test_the_weights_are_those_of_threads(settings, monkeypatch):
    given = dict(settings)
    make, count = given.pop("make", lambda: networks.mlp(6)), given.pop("count")
    jit_compile = given.pop("jit_compile", False)
    given = {"cuts": networks.cuts(6, 4), **{name: each for name, each in given.items() if each is not None}}
    with monkeypatch.context() as patch:
        inside.by_threads(patch)
        wanted, _ = trained(make, given, jit_compile)
    in_calls_of(count, monkeypatch)
    found, pm = trained(make, given, jit_compile)
    assert inside.is_program(pm)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine == other).all()
    spans = pm.trace.spans
    assert sorted({int(each) for each in spans.microbatch}) == [*range(len({*spans.microbatch.tolist()}))]


def test_calls_have_as_many_minibatches_as_take_a_call_s_time():
    def at_once(units, rows):
        model = keras.Sequential([keras.Input((units,)), *[keras.layers.Dense(units) for _ in range(8)]])
        return minibatches_of_call(Chain(model), 2, rows)

    assert at_once(8, 8) == 8
    assert 1 < at_once(256, 128) < 8
    assert at_once(1024, 128) == 1


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.wide), 3])
def test_keras_argument_says_how_many_minibatches_a_call_has(steps):
    """Callbacks see every one of them, and the weights are the same."""
    x, y = networks.data(7 * BATCH)
    trained, seen = [], []
    for asked in ({}, {"steps_per_execution": steps}):
        keras.utils.set_random_seed(0)
        pm = pipetrain.PipelineModel(networks.mlp(4), cuts=networks.cuts(4, 2), scheme="vanilla")
        pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy(), **asked)
        looking = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
        pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[looking])
        trained.append(pm.get_weights())
    assert seen == 2 * [*range(7)]
    networks.assert_equal(*trained)
    assert inside.is_program(pm) is (steps > 1)
    assert getattr(inside.runner(pm), "minibatches", 1) == steps


def test_what_a_callback_has_been_told_ends_the_fit(monkeypatch):
    """A drain within a callback raises what a stage has raised, and so does the fit that goes on."""
    in_calls_of(2, monkeypatch)
    pm, seen = networks.pipeline(networks.mlp(4), cuts=networks.cuts(4, 2), scheme="vanilla"), []
    x, y = networks.data(20 * BATCH)
    y[12 * BATCH] = 99

    def look(batch, logs):
        if batch == 8:
            with pytest.raises(tf.errors.InvalidArgumentError, match="99") as raised:
                pm.get_weights()
            seen.append(raised.value)

    looking = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    with pytest.raises(tf.errors.InvalidArgumentError, match="99") as raised:
        pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[looking])
    assert raised.value is seen[0]
    assert "stage 1, forward of minibatch 12" in "\n".join(raised.value.__notes__)


def test_an_interrupt_counts_what_all_stages_have_updated(monkeypatch):
    in_calls_of(2, monkeypatch)
    pm = networks.pipeline(networks.mlp(4), cuts=networks.cuts(4, 2), scheme="vanilla")

    def interrupt(batch, logs):
        if batch == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupting = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
        pm.fit(*networks.data(ROWS), batch_size=BATCH, shuffle=False, verbose=0, callbacks=[interrupting])
    made = [count for (stage,) in inside.replicas(pm) for count in stage.counts()]
    # The sixth result is there before the first stage's backward, which may be in a call that is not made any more.
    assert int(pm.optimizer.iterations) == min(made) >= 5


def test_no_stage_goes_on_while_a_snapshot_is_looked_at(monkeypatch):
    in_calls_of(2, monkeypatch)
    pm, seen = networks.pipeline(networks.mlp(4), cuts=networks.cuts(4, 2), scheme="vanilla"), []

    def look(step, model):
        assert step <= len(done)  # its own result is there, though weights of later steps may be kept by now
        with pytest.raises(RuntimeError, match="rest while a snapshot is looked at"):
            pm.get_weights()
        seen.append(step)

    done: list[int] = []
    counting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: done.append(batch))
    callbacks = [counting, pipetrain.callbacks.Snapshots(3, look)]
    pm.fit(*networks.data(ROWS), batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    assert seen == [3, 6, 9, 12]
