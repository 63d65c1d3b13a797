"""Coded gradients: the weights of plain Keras, whoever is late."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from interrupted import assert_goes_on, assert_keeps_steps
from transfer_models import branching, noisy, stateful, words

import pipetrain
from pipetrain.compute.transfers.coded import CodedFunctions
from pipetrain.run.tree_worker import TreeWorker

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.8), momentum=0.9),
    "clipped": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
    "accumulating": lambda: keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
    "averaging": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9),
    "scaled": lambda: keras.optimizers.SGD(0.05, loss_scale_factor=8.0),
}
TREES = ((3, 1, 1), (4, 1, 1), (3, 2, 1), (2, 2, 1), (4, 1, 2), (3, 1, 0), (1, 1, 0))
DATA = networks.data(70)  # whose last batch is short


def tree(children, depth=1, stragglers=1):
    """The arguments of a tree, whose workers share the tests' devices."""
    workers = sum(children**level for level in range(1, depth + 1))
    devices = tuple(f"CPU:{n % 6}" for n in range(workers))
    return {
        "scheme": "coded-reduce",
        "children": children,
        "depth": depth,
        "stragglers": stragglers,
        "devices": devices,
    }


def trained(model, optimizer=None, data=DATA, fit=None, loss=None, **options):
    """The model after two epochs, by itself or by coded gradients, and its History."""
    model = networks.in_way(model, **options) if options else model
    model.compile(optimizer or OPTIMIZERS["momentum"](), loss or networks.crossentropy(), metrics=["accuracy"])
    return model, networks.fit(model, *data, epochs=2, validation_data=data, **(fit or {})).history


class Late:
    """Workers that are kept in steps until they are let go: pairs of worker and step, by the thread's own count."""

    def __init__(self, monkeypatch, *places):
        self._gates = {place: threading.Event() for place in places}
        self.began = {place: threading.Event() for place in places}
        compute = TreeWorker._compute

        def gated(worker, step, parts, weights):
            place = worker.worker, step.number
            if place in self._gates:
                self.began[place].set()
                self._gates[place].wait()
            return compute(worker, step, parts, weights)

        monkeypatch.setattr(TreeWorker, "_compute", gated)

    def release(self, *places):
        for place in places or self._gates:
            self._gates[place].set()


def releasing(late, after, *places):
    """A callback that lets workers go when a step has ended."""

    def end(batch, logs):
        if batch == after:
            late.release(*places)

    return keras.callbacks.LambdaCallback(on_train_batch_end=end)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("shape", "name"),
    parameters.combinations(
        TREES,
        tuple(OPTIMIZERS),
        default=[((4, 1, 1), "clipped"), ((3, 2, 1), "adam"), ((1, 1, 0), "accumulating")],
    ),
)
def test_weights_and_logs_are_those_of_the_whole_minibatch(shape, name):
    single, expected = trained(networks.small(), OPTIMIZERS[name]())
    pm, history = trained(networks.small(), OPTIMIZERS[name](), **tree(*shape))
    networks.assert_close(pm.get_weights(), single.get_weights())
    assert int(pm.optimizer.iterations) == int(single.optimizer.iterations)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, atol=1e-6)


def convolutional():
    """Without BatchNormalization, which is refused, and Dropout, which draws for each part of the rows."""
    keras.utils.set_random_seed(1)
    others = keras.layers.BatchNormalization, keras.layers.SpatialDropout2D
    return keras.Sequential([each for each in networks.convolutional_layers() if not isinstance(each, others)])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("make", "shape"),
    parameters.combinations((convolutional, words, branching), ((3, 1, 1), (4, 1, 1)), default=[(words, (3, 1, 1))]),
)
def test_other_models_train_as_plain_keras_does(make, shape):
    """Convolutions, embeddings, recurrent layers, and branches."""
    inputs = {convolutional: networks.normal(70, 8, 8, 3), words: np.random.default_rng(0).integers(0, 20, (70, 6))}
    data = inputs.get(make, DATA[0]), DATA[1]
    single, expected = trained(make(), data=data)
    pm, history = trained(make(), data=data, **tree(*shape))
    networks.assert_close(pm.get_weights(), single.get_weights())
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_losses_that_are_sums_or_of_every_row(reduction):
    loss = partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True, reduction=reduction)
    optimizer = partial(keras.optimizers.SGD, 0.001)
    single, expected = trained(networks.small(), optimizer(), loss=loss())
    pm, history = trained(networks.small(), optimizer(), loss=loss(), **tree(3))
    networks.assert_close(pm.get_weights(), single.get_weights())
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


def test_a_loss_that_is_a_sum_counts_fully_for_every_part():
    x, y = networks.data(20)
    results = []
    for options in ({}, tree(3)):
        model = networks.mlp(2)
        model = networks.in_way(model, **options) if options else model
        model.compile(keras.optimizers.SGD(0.01), networks.crossentropy(reduction="sum"))
        losses = networks.fit(model, x, y, batch_size=10).history["loss"]
        results.append([*model.get_weights(), np.array(losses)])
    networks.assert_close(results[1], results[0])


@pytest.mark.wide
@pytest.mark.parametrize("shape", parameters.by_default(TREES, (3, 2, 1)))
def test_a_minibatch_of_fewer_rows_than_workers_trains_with_them(shape):
    data = networks.data(41)  # whose last batch has one row
    single, _ = trained(networks.small(), data=data)
    pm, _ = trained(networks.small(), data=data, **tree(*shape))
    networks.assert_close(pm.get_weights(), single.get_weights())


@pytest.mark.wide
@pytest.mark.parametrize(
    ("shape", "gone"),
    parameters.combinations(
        ((3, 1, 1), (4, 1, 2), (3, 2, 1)),
        (0, 1, 2),
        default=[((4, 1, 2), 1), ((3, 2, 1), 2)],
    ),
)
def test_as_many_stragglers_as_a_tree_bears_change_nothing_and_are_counted(shape, gone, monkeypatch):
    """The same ones under every parent, from the first step to the end of the epoch."""
    children, _, stragglers = shape
    count = len(tree(*shape)["devices"])
    gone = [place for place in range(count) if (place - gone) % children < stragglers]
    single, _ = trained(networks.small(), data=(DATA[0][:60], DATA[1][:60]))
    late = Late(monkeypatch, *[(worker, 0) for worker in gone])
    pm = networks.in_way(networks.small(), **tree(*shape))
    pm.compile(OPTIMIZERS["momentum"](), networks.crossentropy())
    for _ in range(2):
        networks.fit(pm, DATA[0][:60], DATA[1][:60], callbacks=[releasing(late, 2)])
    networks.assert_close(pm.get_weights(), single.get_weights())
    assert all(pm.stragglers[worker] >= 3 for worker in gone if worker < children or worker // children - 1 not in gone)
    trace = pm.trace
    done = Counter(zip(trace.spans.replica.tolist(), trace.spans.op.tolist()))
    assert done[0, "B"] == 6
    assert all(done[worker + 1, "FB"] <= 4 for worker in gone)  # the first step, and those of the second epoch


def test_a_late_worker_leaves_out_steps_and_goes_on_with_the_newest_weights(monkeypatch):
    late = Late(monkeypatch, (1, 1), (0, 4))  # step 4 then needs the one that was late before
    pm = networks.in_way(networks.small(), **tree(3))
    pm.compile("sgd", networks.crossentropy())
    waits = threading.Event()

    def begin(batch, logs):
        if batch == 5:
            late.release((0, 4))
        if batch == 4:
            late.release((1, 1))
            while inside.runner(pm)._exchange.free([1], step_after(pm)) == []:
                waits.wait(1e-3)

    steps = [keras.callbacks.LambdaCallback(on_train_batch_begin=begin)]
    pm.fit(*networks.data(140), batch_size=20, verbose=0, callbacks=steps)
    mine = pm.trace.spans[pm.trace.spans.replica == 2]
    assert mine.microbatch.tolist()[:2] == [0, 1] and mine.microbatch[2] == 4
    assert pm.stragglers[1] >= 3
    used = {(each.from_replica, each.microbatch) for each in pm.trace.transfers}
    assert not used & {(2, 1), (2, 2), (2, 3)}
    assert all(sum(step == number for _, step in used) == 2 for number in range(7))


def step_after(pm):
    """A step that nobody is at, for what the exchange is asked."""
    return inside.runner(pm)._exchange._step._replace(number=-1)


@pytest.mark.wide
def test_more_stragglers_than_a_tree_bears_are_waited_for(monkeypatch):
    late = Late(monkeypatch, (0, 1), (1, 1))
    single, _ = trained(networks.small())

    def let_go():
        for began in late.began.values():
            began.wait()
        late.release((1, 1))

    waiting = threading.Thread(target=let_go)
    waiting.start()
    pm = networks.in_way(networks.small(), **tree(3))
    pm.compile(OPTIMIZERS["momentum"](), networks.crossentropy())
    for _ in range(2):
        networks.fit(pm, *DATA, callbacks=[releasing(late, 3)])
    waiting.join()
    networks.assert_close(pm.get_weights(), single.get_weights())


@pytest.mark.wide
@pytest.mark.parametrize("shape", parameters.by_default([(4, 1, 1), (3, 1, 1)], (4, 1, 1)))
def test_random_numbers_are_those_of_the_rows_whoever_draws_them(shape, monkeypatch):
    """Bitwise with repetition, where another's message is the same."""

    def dropping():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.4), keras.layers.Dense(5)]
        return keras.Sequential([keras.Input((12,)), *layers])

    found = []
    for gone in (0, 1):
        late = Late(monkeypatch, *[(gone, step) for step in range(4)])
        pm = networks.in_way(dropping(), **tree(*shape))
        pm.compile(OPTIMIZERS["momentum"](), networks.crossentropy())
        history = networks.fit(pm, *DATA, callbacks=[releasing(late, 3)]).history
        found.append((pm, history["loss"]))
        monkeypatch.undo()
    (first, losses), (second, again) = found
    same = networks.assert_equal if shape[0] == 4 else networks.assert_close
    same(first.get_weights(), second.get_weights())
    np.testing.assert_allclose(losses, again, rtol=1e-5)
    seeds = [[keras.ops.convert_to_numpy(each) for each in pm.model.layers[1].variables] for pm, _ in found]
    np.testing.assert_array_equal(*seeds)
    plain = dropping()
    plain.compile(OPTIMIZERS["momentum"](), networks.crossentropy())
    networks.fit(plain, *DATA)
    np.testing.assert_array_equal(
        seeds[0][0], keras.ops.convert_to_numpy(plain.layers[1].variables[0])
    )  # as many draws


class OwnNoise(keras.layers.Layer):
    """Draws numbers that nothing can draw again."""

    def call(self, x, training=None):
        return x + tf.random.normal(tf.shape(x)) if training else x


def normalized(*layers):
    return keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(5)])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: normalized(keras.layers.BatchNormalization(name="bn")), r"as BatchNormalization does.*bn\. Try"),
        (noisy, "layers that assign while they run: .*spectral"),
        (stateful, "layers that assign while they run: "),
        (lambda: normalized(OwnNoise()), "RandomStandardNormal, which has no seed"),
    ],
)
def test_layers_whose_gradients_another_worker_cannot_repeat_are_refused(make, problem):
    pm = networks.in_way(make(), **tree(2))
    pm.compile("sgd", networks.crossentropy())
    with pytest.raises(ValueError, match=problem):
        networks.fit(pm, DATA[0][:20], DATA[1][:20], batch_size=10)


@pytest.mark.wide
@pytest.mark.parametrize(
    "optimizer", [keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01), keras.optimizers.SGD(0.1, clipvalue=0.1)]
)
def test_an_embedding_whose_words_are_not_to_be_summed_is_refused(optimizer):
    """A word that comes several times in a minibatch has several gradients, which these square or clip one by one."""
    pm = networks.in_way(words(), **tree(2))
    pm.compile(optimizer, networks.crossentropy())
    tokens = np.random.default_rng(0).integers(0, 20, (20, 6))
    with pytest.raises(ValueError, match=r"sum of the gradients of each word.*embeddings.*all-reduce"):
        networks.fit(pm, tokens, DATA[1][:20], batch_size=10)


@pytest.mark.wide
def test_frozen_normalization_trains():
    def frozen():
        keras.utils.set_random_seed(1)
        model = normalized(keras.layers.BatchNormalization())
        model.layers[0].trainable = False
        return model

    single, _ = trained(frozen())
    pm, _ = trained(frozen(), **tree(3))
    networks.assert_close(pm.get_weights(), single.get_weights())


@pytest.mark.wide
def test_evaluation_prediction_and_files_have_the_weights_of_all_steps(tmp_path):
    (single, _), (pm, _) = trained(networks.small()), trained(networks.small(), **tree(3))
    networks.assert_has_the_weights_of_all_steps(pm, single, DATA, tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("shape", parameters.by_default([(4, 1, 1), (3, 1, 1)], (4, 1, 1)))
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(shape, tmp_path):
    """Bitwise with repetition; snapshots on the way are those of plain Keras."""
    same = networks.assert_equal if shape[0] == 4 else networks.assert_close
    assert_goes_on(lambda: networks.in_way(networks.small(), **tree(*shape)), networks.small(), DATA, tmp_path, same)


@pytest.mark.wide
def test_an_interrupt_just_after_a_step_leaves_the_weights_of_that_step(monkeypatch):
    pm = networks.in_way(networks.small(), **tree(3))
    assert_keeps_steps(pm, networks.small(), DATA, CodedFunctions, "update", OPTIMIZERS["momentum"], monkeypatch)


@pytest.mark.wide
@pytest.mark.parametrize("worker", parameters.by_default([0, 5], 5))
def test_what_a_worker_raises_ends_training_with_a_note_and_it_may_go_on(worker, monkeypatch):
    """Of a child of the root, and of a worker at the end of the tree."""
    pm = networks.in_way(networks.small(), **tree(3, 2))
    pm.compile(OPTIMIZERS["momentum"](), networks.crossentropy())
    compute = TreeWorker._compute

    def broken(self, step, parts, weights):
        if (self.worker, step.number) == (worker, 1):
            raise OSError("no such row")
        return compute(self, step, parts, weights)

    monkeypatch.setattr(TreeWorker, "_compute", broken)
    with pytest.raises(OSError, match="no such row") as raised:
        networks.fit(pm, *DATA, epochs=50)
    assert raised.value.__notes__ == [f"Raised in step 1 of worker {worker}"]
    monkeypatch.undo()
    before = int(pm.optimizer.iterations)
    networks.fit(pm, *DATA)
    assert int(pm.optimizer.iterations) == before + 4


def test_a_late_worker_that_fails_while_the_root_updates_ends_training_after_the_step(monkeypatch):
    """The sum was there without it: the step is whole, with outputs and seeds, and the next one raises."""
    layers = [keras.layers.Dense(8), keras.layers.Dropout(0.2, seed=1), keras.layers.Dense(networks.CLASSES)]
    pm = networks.in_way(keras.Sequential([keras.Input((networks.FEATURES,)), *layers]), **tree(3))
    pm.compile("sgd", networks.crossentropy())
    compute, update, summed, steps = TreeWorker._compute, CodedFunctions.update, threading.Event(), []

    def broken(self, step, parts, weights):
        if (self.worker, step.number) == (2, 1):
            assert summed.wait(60)
            raise OSError("no such row")
        return compute(self, step, parts, weights)

    def updated(self, *given):
        made = update(self, *given)
        steps.append(made)
        if len(steps) == 2:
            summed.set()
            while not inside.runner(pm)._control.closed:
                time.sleep(1e-3)
        return made

    monkeypatch.setattr(TreeWorker, "_compute", broken)
    monkeypatch.setattr(CodedFunctions, "update", updated)
    with pytest.raises(OSError, match="no such row") as raised:
        networks.fit(pm, *DATA)
    assert raised.value.__notes__ == ["Raised in step 1 of worker 2"]
    assert len(steps) == int(pm.optimizer.iterations) == 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"scheme": "coded-reduce"}, r"how many children.*Try scheme=pipetrain.CodedReduce\(children=3\)"),
        ({"scheme": "coded-reduce", "children": 3, "stragglers": 3}, "no straggler.*stragglers=3"),
        ({"scheme": "coded-reduce", "children": 7}, "has 7 workers.*6 devices.*set_cpu_devices"),
        ({"scheme": "coded-reduce", "children": 3, "stages": 2}, "has 3 workers.*stages=2"),
        ({"scheme": "coded-reduce", "children": 3, "cuts": ("d1",)}, "the whole model on every device"),
        ({"scheme": "coded-reduce", "children": 3, "replicas": (2,)}, "has no stages to replicate"),
        ({"scheme": "coded-reduce", "children": 3, "microbatches": 2}, "does not split a minibatch"),
        ({"scheme": "coded-reduce", "children": 3, "order": "tic"}, "order their transfers"),
        ({"scheme": "all-reduce", "children": 3}, "Only coded-reduce has a tree.*children=3, scheme='all-reduce'"),
        ({"scheme": "1f1b", "depth": 1}, "Only coded-reduce has a tree.*depth=1"),
    ],
)
def test_what_there_is_not_is_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        networks.in_way(networks.small(), **options)


def test_dynamic_loss_scaling_is_refused_and_other_schemes_have_no_stragglers():
    pm = networks.in_way(networks.small(), **tree(2))
    with pytest.raises(ValueError, match=r"Dynamic loss scaling is not supported here.*scheme='coded-reduce'"):
        pm.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), networks.crossentropy())
    assert pipetrain.PipelineModel(networks.small(), scheme="single").stragglers == ()
