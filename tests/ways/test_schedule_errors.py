"""Errors in every action of schedules with several stages a device, or with backwards in halves.

They come of the data, in one microbatch: an input has a column of marks, by which a layer's operations fail.
"""

from __future__ import annotations

import threading
from functools import cache

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from schedule_training import pipelined

from pipetrain.schemes.schedules import joined, orders
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import SCHEDULED

DEVICES, MICROBATCHES, WIDTH, ROWS = 2, 4, 4, 8
MINIBATCH, NUMBER = 1, 1 * MICROBATCHES + 2  # where they come, the microbatches numbered through
ABOUT = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
MARKS = {"F": 1, "I": 2, "W": 3, "update": 4}  # and ten times the layer's number

by_scheme = pytest.mark.parametrize(
    "scheme", parameters.by_default([*SCHEDULED, "interleaved/3", "looped-bfs/3"], "zb-v")
)


def zero_unless(failing):
    """Zero; where any of these is true, the operation fails, which has no side effects."""
    return tf.gather(tf.zeros([2]), 9 * tf.cast(tf.reduce_any(failing), tf.int32))


class Bounded(keras.constraints.Constraint):
    """Fails after an update by a gradient that is far too large."""

    def __call__(self, weight):
        return weight + zero_unless(tf.abs(weight) > 100)


class Faulty(keras.layers.Layer):
    """A dense layer that hands the marks on."""

    def __init__(self, number, **settings):
        super().__init__(name=f"d{number}", **settings)
        self.number = number

    def build(self, shape):
        self.kernel = self.add_weight((WIDTH, WIDTH), name="kernel", constraint=Bounded())
        self.bias = self.add_weight((WIDTH,), "zeros", name="bias")

    def call(self, x):
        marks = x[:, WIDTH:]
        product = self._product(x[:, :WIDTH], marks, tf.convert_to_tensor(self.kernel))
        return tf.concat([tf.tanh(product + self.bias), marks], 1)

    def _marked(self, marks, what):
        return tf.equal(marks, 10.0 * self.number + MARKS[what])

    @tf.custom_gradient
    def _product(self, x, marks, kernel):
        def backward(upstream):
            by_input = tf.matmul(upstream, kernel, transpose_b=True)
            by_input += zero_unless(self._marked(marks, "I") & tf.math.is_finite(by_input))
            by_weight = tf.matmul(x, upstream, transpose_a=True)
            by_weight += zero_unless(tf.reduce_any(self._marked(marks, "W")) & tf.math.is_finite(by_weight))
            large = 1e6 * tf.cast(tf.reduce_any(self._marked(marks, "update")), tf.float32)
            return by_input, tf.zeros_like(marks), by_weight + large

        return tf.matmul(x, kernel) + zero_unless(self._marked(marks, "F")), backward


class Unmarked(keras.layers.Layer):
    """Takes the marks away."""

    def call(self, x):
        return x[:, :WIDTH]


def data(mark=0.0, minibatches=3):
    """Minibatches, of which one microbatch has the mark."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(3 * ROWS, WIDTH)), np.zeros((3 * ROWS, 1))], 1).astype("float32")
    y = rng.integers(0, networks.CLASSES, 3 * ROWS).astype("int32")
    x[NUMBER * ROWS // MICROBATCHES, WIDTH] = mark
    return x[: minibatches * ROWS], y[: minibatches * ROWS]


def fit(pm, x, y, **settings):
    return networks.fit(pm, x, y, batch_size=ROWS, **settings)


def anew(pm, first):
    networks.begin_anew(pm, first)
    pm.optimizer.iterations.assign(0)


@cache
def built(scheme):
    """A pipeline of two layers a stage, made once for all tests, and its weights after 0, 1, 2 and 3 minibatches."""
    name, _, chunks = scheme.partition("/")
    stages = DEVICES * int(chunks or SCHEDULED[name].schedule.chunks)
    keras.utils.set_random_seed(0)
    layers = [keras.Input((WIDTH + 1,)), *(Faulty(n) for n in range(2 * stages)), Unmarked()]
    model = keras.Sequential([*layers, keras.layers.Dense(networks.CLASSES)])
    cuts = networks.cuts(2 * stages, stages)
    pm = pipelined(model, scheme, DEVICES, cuts=cuts, microbatches=MICROBATCHES)
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
    weights = [pm.get_weights()]
    for minibatches in (1, 2, 3):
        anew(pm, weights[0])
        fit(pm, *data(minibatches=minibatches))
        weights.append(pm.get_weights())
    return pm, weights


def schedule(pm):
    """What each device does: lists of actions, each executed in one call."""
    scheme = inside.strategy(pm)._scheme
    assert isinstance(scheme, Scheme)
    return [[*joined(iter(order), MICROBATCHES)] for order in orders(scheme.schedule.order, DEVICES, 3, MICROBATCHES)]


def failing(pm, stage, what):
    """The action in which it fails: of several W in one call the last one, of an update the last of its minibatch."""
    calls = [call for order in schedule(pm) for call in order if call[0].stage == stage]
    halved = any(call[0].op == "W" for call in calls)
    op = what if what == "F" or (what == "I" and halved) else "W" if halved else "B"
    calls = [call for call in calls if call[0].op == op]
    if what == "update":
        return [call for call in calls if call[0].microbatch // MICROBATCHES == MINIBATCH][-1][-1]
    (call,) = [call for call in calls if NUMBER in [action.microbatch for action in call]]
    return call[-1]


def no_thread_left():
    return not [each for each in threading.enumerate() if each.name.startswith("pipetrain")]


def assert_named(error, action):
    place = f"stage {action.stage}, {ABOUT[action.op]} of minibatch {MINIBATCH}, microbatch "
    assert f"{place}{action.microbatch % MICROBATCHES} (action {action})" in error.__notes__[-1]


@pytest.mark.wide
@by_scheme
@pytest.mark.parametrize("what", MARKS)
def test_an_operation_that_fails_is_named_and_no_update_is_made_in_part(scheme, what):
    """Every stage then has the weights before or after the minibatch's update, this stage those before."""
    pm, weights = built(scheme)
    stages = len(inside.replicas(pm))
    for stage in range(stages):
        anew(pm, weights[0])
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"indices\[?0?\]? = 9") as caught:
            fit(pm, *data(10 * (2 * stage + 1) + MARKS[what]))
        assert_named(caught.value, failing(pm, stage, what))
        assert no_thread_left()
        left = pm.get_weights()
        for each in range(stages):
            mine = slice(4 * each, 4 * each + 4 if each < stages - 1 else None)
            before, after, now = (every[mine] for every in (weights[MINIBATCH], weights[MINIBATCH + 1], left))
            if (each == stage and what != "update") or what == "F" or (what == "I" and each < stage):
                networks.assert_equal(now, before)
            elif each != stage:
                networks.assert_equal(now, after if (now[0] == after[0]).all() else before)
    anew(pm, weights[0])
    fit(pm, *data())
    networks.assert_equal(pm.get_weights(), weights[3])


@pytest.mark.wide
@by_scheme
def test_a_loss_that_fails_is_the_last_stage_s_forward(scheme):
    pm, weights = built(scheme)
    anew(pm, weights[0])
    x, y = data()
    y[NUMBER * ROWS // MICROBATCHES] = 99
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 99") as caught:
        fit(pm, x, y)
    assert_named(caught.value, failing(pm, len(inside.replicas(pm)) - 1, "F"))
    assert no_thread_left()
    networks.assert_equal(pm.get_weights(), weights[MINIBATCH])


@pytest.mark.wide
@by_scheme
def test_data_that_fail_and_an_interrupt_leave_whole_updates(scheme):
    pm, weights = built(scheme)
    x, y = data()

    def source():
        yield x[:ROWS], y[:ROWS]
        yield x[ROWS : 2 * ROWS], y[ROWS : 2 * ROWS]
        raise RuntimeError("no more")

    def interrupt(batch, logs):
        if batch == 1:
            raise KeyboardInterrupt

    specs = tf.TensorSpec([ROWS, WIDTH + 1]), tf.TensorSpec([ROWS], tf.int32)
    anew(pm, weights[0])
    with pytest.raises(tf.errors.OpError, match="no more"):
        pm.fit(tf.data.Dataset.from_generator(source, output_signature=specs), verbose=0)
    assert no_thread_left()
    assert int(pm.optimizer.iterations) == 2
    networks.assert_equal(pm.get_weights(), weights[2])
    anew(pm, weights[0])
    with pytest.raises(KeyboardInterrupt):
        fit(pm, x, y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)])
    assert no_thread_left()
    networks.assert_equal(pm.get_weights(), weights[2])


@pytest.mark.wide
@by_scheme
def test_nan_stops_and_names_the_step(scheme):
    pm, weights = built(scheme)
    anew(pm, weights[0])
    x, y = data()
    x[NUMBER * ROWS // MICROBATCHES, 0] = np.nan
    with pytest.raises(FloatingPointError, match="nan at step 2"):
        fit(pm, x, y)
    assert no_thread_left()
    networks.assert_equal(pm.get_weights(), weights[0])
