"""Timing changes nothing; an exception anywhere reaches the caller; nothing hangs and no thread is left."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from networks import fit

import pipetrain
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.program.stage_trace import StageTrace
from pipetrain.run import control, device_threads, stage_work
from pipetrain.run.control import RunSettings
from pipetrain.schemes.table import SCHEMES as SCHEME_TABLE

ROWS, BATCH = 12 * 16, 16


class Breakable(keras.layers.Layer):
    """Gives its input; ``broken`` is the call, "F" or "B" and its number since it was armed, that fails."""

    broken: tuple[str, int] | None = None

    def arm(self, op, number):
        self.broken, self.calls = (op, number), {"F": 0, "B": 0}

    def call(self, inputs):
        return self._through(inputs)

    def _pass(self, op, values):
        def run(array):
            if self.broken:
                if self.broken == (op, self.calls[op]):
                    raise RuntimeError("boom")
                self.calls[op] += 1
            return array

        passed = tf.numpy_function(run, [values], values.dtype)
        passed.set_shape(values.shape)
        return passed

    @tf.custom_gradient
    def _through(self, inputs):
        return self._pass("F", inputs), lambda upstream: self._pass("B", upstream)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(SCHEME_TABLE, "single", "spectrain"))
def test_an_exception_in_any_stage_reaches_the_caller(scheme):
    x, y = networks.data(rows=ROWS)
    stages = 1 if scheme == "single" else 3
    breakables = [Breakable(name=f"breakable_{k}") for k in range(stages)]
    layers = [layer for each in breakables for layer in (keras.layers.Dense(8, "relu"), each)]
    outputs = keras.layers.Dense(networks.CLASSES)
    model = keras.Sequential([keras.Input(x.shape[1:]), *layers, outputs])
    pm = pipetrain.PipelineModel(model, scheme=scheme, cuts=[each.name for each in breakables[:-1]] or None)
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
    pm.fit(x, y, batch_size=BATCH, verbose=0)
    number = 5
    minibatch, piece = divmod(number, inside.microbatches(pm))
    for k, breakable in enumerate(breakables):
        for op, kind in (("F", "forward"), ("B", "backward")):
            breakable.arm(op, number)
            with pytest.raises(tf.errors.OpError, match="boom") as caught:
                pm.fit(x, y, batch_size=BATCH, verbose=0)
            which = f"{minibatch}, microbatch {piece}" if inside.microbatches(pm) > 1 else f"{minibatch}"
            assert f"stage {k}, {kind} of minibatch {which} (action {k}{op}{number})" in caught.value.__notes__[-1]
        breakable.broken = None
    history = pm.fit(x, y, batch_size=BATCH, verbose=0).history
    assert np.isfinite(history["loss"][-1])


@pytest.mark.parametrize("scheme", parameters.by_default(["1f1b", "single"], "single", wide=["1f1b"]))
def test_data_that_fail_take_no_earlier_minibatch_along(scheme):
    x, y = networks.data(rows=BATCH)

    def source():
        for _ in range(3):
            yield x, y
        raise RuntimeError("no more")

    specs = tf.TensorSpec(x.shape), tf.TensorSpec(y.shape, tf.int32)
    pm = networks.pipeline(scheme=scheme)
    with pytest.raises(tf.errors.OpError, match="no more"):
        pm.fit(tf.data.Dataset.from_generator(source, output_signature=specs), verbose=0)
    assert int(pm.optimizer.iterations.numpy()) == 3


class Looks(keras.layers.Layer):
    """Adds what it looks up in a table that ends before what great numbers ask for."""

    def call(self, x):
        return x + tf.gather(tf.ones([4]), 9 * tf.cast(tf.reduce_max(x) > 100, tf.int32))


@pytest.mark.wide
def test_an_operation_without_side_effects_fails_in_the_action_that_it_belongs_to():
    values = inputs = keras.Input((4,))
    for name in ("first", "second", "third", "fourth"):
        values = keras.layers.Dense(4, kernel_initializer="ones", name=name)(values)
    pm = pipetrain.PipelineModel(keras.Model(inputs, Looks()(values)), cuts=("first",), scheme="vanilla")
    pm.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.full((40, 4), 0.01, "float32")
    x[16:24] = 1000
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:  # within the call that is both actions
        pm.fit(x, x, batch_size=8, shuffle=False, verbose=0)
    assert "stage 1, forward of minibatch 2 (action 1F2)" in "\n".join(caught.value.__notes__)


@pytest.mark.wide
def test_an_interrupt_ends_the_threads_and_keeps_the_weights():
    x, y = networks.data(rows=ROWS)
    pm = networks.pipeline()
    before = pm.get_weights()

    def interrupt(batch, logs):
        if batch == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pm.fit(
            x, y, batch_size=BATCH, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)]
        )
    assert any((a != b).any() for a, b in zip(before, pm.get_weights()))
    pm.fit(x, y, batch_size=BATCH, verbose=0)


def test_a_broken_data_source_is_heard():
    def source():
        x, y = networks.data(rows=64)
        for n in range(4):
            yield x[16 * n : 16 * n + 16], y[16 * n : 16 * n + 16]
        raise RuntimeError("the disk is gone")

    with pytest.raises(Exception, match="the disk is gone"):
        networks.pipeline().fit(source(), steps_per_epoch=8, verbose=0)


def test_of_two_stages_that_fail_at_once_the_first_is_reported(monkeypatch):
    """The second comes while the first is still being noted."""
    shared = control.Control(RunSettings())
    second_came, noting = threading.Event(), threading.Event()

    def add_note(error, note):
        noting.set()
        second_came.wait(0.2)  # which it cannot while this one has not ended

    monkeypatch.setattr(control, "add_note", add_note)
    first = threading.Thread(target=shared.fail, args=(KeyError("first"), "here"))
    first.start()
    noting.wait()
    shared.fail(ValueError("second"), "there")
    second_came.set()
    first.join()
    assert isinstance(shared.error, KeyError)


@pytest.mark.parametrize("ended_first", [0, 1])
def test_pipelines_that_overlap_leave_pythons_switch_interval_as_it_was(ended_first):
    usual_s = sys.getswitchinterval()
    holders = [object(), object()]
    for holder in holders:
        device_threads.shorten(holder)
        device_threads.shorten(holder)  # started again after an interrupt
    assert sys.getswitchinterval() == pytest.approx(device_threads.SHORT_S)
    for _ in range(2):  # an end that was interrupted comes again
        device_threads.let_go(holders[ended_first])
    assert sys.getswitchinterval() == pytest.approx(device_threads.SHORT_S)
    device_threads.let_go(holders[1 - ended_first])
    assert sys.getswitchinterval() == pytest.approx(usual_s)


@pytest.mark.wide
@pytest.mark.parametrize("ended_first", [0, 1])
def test_models_trained_at_once_leave_pythons_switch_interval_as_it_was(ended_first, monkeypatch):
    """The second begins when the first is under way; whichever ends first, the other keeps its short interval."""
    inside.by_threads(monkeypatch)
    usual_s, (x, y) = sys.getswitchinterval(), networks.data(60)
    models = [networks.pipeline(networks.small(), scheme="vanilla", cuts=("d0",)) for _ in range(2)]
    under_way, ended, seen_s, errors = [threading.Event(), threading.Event()], threading.Event(), [], []

    def note(number):
        def after_batch(batch, logs):
            under_way[number].set()
            assert under_way[1 - number].wait(60)
            assert number == ended_first or ended.wait(60)
            seen_s.append(sys.getswitchinterval())

        return keras.callbacks.LambdaCallback(on_train_batch_end=after_batch)

    def train(number):
        try:
            fit(models[number], x, y, callbacks=[note(number)])
        except BaseException as error:
            errors.append(error)
        if number == ended_first:
            ended.set()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    threads[0].start()
    assert under_way[0].wait(60)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert not errors and [int(each.optimizer.iterations) for each in models] == [3, 3]
    assert seen_s == pytest.approx([device_threads.SHORT_S] * 6)
    assert sys.getswitchinterval() == pytest.approx(usual_s)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["spectrain", "1f1b"])
def test_training_goes_on_after_a_loss_that_was_not_finite(scheme):
    x, y = networks.data(200)
    pm = networks.pipeline(scheme=scheme)
    with pytest.raises(FloatingPointError):
        fit(pm, x * np.nan, y)
    history = fit(pm, x, y, epochs=2).history
    assert np.isfinite(history["loss"]).all()


def test_weights_are_all_of_one_step_when_handing_them_back_fails(monkeypatch):
    """A worker that died then left some stages' weights newer than the others'."""
    x, y = networks.data(80)
    pm = networks.pipeline(scheme="vanilla")
    fit(pm, x, y)
    before, original = pm.get_weights(), Stage.outcome

    def broken(self, others):
        if self is inside.replicas(pm)[-1][0]:
            raise InterruptedError
        return original(self, others)

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(Stage, "outcome", broken)
        fit(pm, x, y)
    networks.assert_equal(pm.get_weights(), before)
    assert int(pm.optimizer.iterations) == 4
    fit(pm, x, y)
    assert int(pm.optimizer.iterations) == 8


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["weight-stashing", "2bw", "gpipe"])
def test_what_a_run_held_is_gone_when_it_ends(scheme, monkeypatch):
    """Old versions and activations are not left to Python's garbage collection, which may come much later.

    Nor is what was traced of them, where a minibatch is one function.
    """
    made = []
    for kind in (stage_work.StageWork, StageTrace):

        def noted(self, *given, init=kind.__init__):
            made.append(weakref.ref(self))
            init(self, *given)

        monkeypatch.setattr(kind, "__init__", noted)
    pm, (x, y) = networks.pipeline(scheme=scheme), networks.data(100)
    gc.disable()
    try:
        networks.fit(pm, x, y)
        assert made and len(made) % 3 == 0  # functions of an asynchronous pipeline are several
        assert not [each for each in made if each() is not None]
    finally:
        gc.enable()
