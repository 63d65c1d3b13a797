"""Data parallelism by all-reduce and by parameter server: the weights of plain Keras, in whatever order they travel."""

from __future__ import annotations

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from interrupted import assert_goes_on, assert_keeps_steps
from transfer_models import branching, convolutional, noisy, stateful, words
from transfer_plans import late_plan, returned_plan

import models
import pipetrain
from pipetrain.compute.transfers import message
from pipetrain.compute.transfers.step import TransferStep
from pipetrain.run import stepwise
from pipetrain.run.step_runner import StepRunner
from pipetrain.run.window import Minibatch, Window
from pipetrain.run.worker_rows import WorkerRows
from pipetrain.schemes.transfers.orders import orders
from pipetrain.schemes.transfers.plan import Pack, Phase, Plan
from pipetrain.trace.idle import inverted

SCHEMES = ("all-reduce", "parameter-server")
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.8), momentum=0.9),
    "clipped": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "accumulating": lambda: keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
    "cut": lambda: keras.optimizers.SGD(0.05, clipvalue=0.01),
    "normed": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1),
    "averaging": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9),
}
DATA = networks.data(70)  # whose last batch is short


def names(workers):
    return tuple(f"CPU:{n}" for n in range(workers))


def trained(model, optimizer=None, data=DATA, fit=None, **settings):
    """The model after two epochs, by itself or by a scheme, and its History."""
    model = networks.in_way(model, **settings) if settings else model
    model.compile(optimizer or OPTIMIZERS["momentum"](), networks.crossentropy(), metrics=["accuracy"])
    return model, networks.fit(model, *data, epochs=2, validation_data=data, **(fit or {})).history


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "workers", "name"),
    parameters.combinations(
        SCHEMES,
        (1, 2, 3),
        tuple(OPTIMIZERS),
        default=[
            ("all-reduce", 3, "clipped"),
            ("parameter-server", 2, "adam"),
            ("parameter-server", 1, "accumulating"),
        ],
    ),
)
def test_weights_and_logs_are_those_of_the_whole_minibatch(scheme, workers, name):
    single, expected = trained(networks.small(), OPTIMIZERS[name]())
    pm, history = trained(networks.small(), OPTIMIZERS[name](), scheme=scheme, devices=names(workers))
    networks.assert_close(pm.get_weights(), single.get_weights())
    assert int(pm.optimizer.iterations) == int(single.optimizer.iterations)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, atol=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("workers", parameters.by_default((2, 3), 2))
def test_gradients_whose_shapes_tensorflow_does_not_know_travel_in_packs(workers):
    """Those of the Transformer's attention."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 50, (24, 6)), rng.integers(0, 3, 24)
    weights = []
    for settings in ({}, {"scheme": "all-reduce", "devices": names(workers), "order": "layerwise"}):
        keras.utils.set_random_seed(0)
        model = models.build("transformer", (6,), 3, depth=1, width=8, vocabulary=50)
        model = networks.in_way(model, **settings) if settings else model
        model.compile(OPTIMIZERS["momentum"](), networks.crossentropy())
        model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    networks.assert_close(*weights)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "summed"),
    [
        *((name, True) for name in ("momentum", "accumulating", "averaging")),
        *((name, False) for name in ("cut", "normed", "adam")),
    ],
)
def test_rows_of_a_word_are_summed_before_they_are_sent_unless_they_are_squared(name, summed, monkeypatch):
    """Adam in Keras squares the rows of an embedding's gradient one by one, as a norm does, and a bound cuts each."""
    x, y = np.random.default_rng(0).integers(1, 20, (24, 6)), DATA[1][:24]
    sent, send = [], message.reduced

    def noted(order, made, sinks, like, *ring):
        for device, gradients in made:
            with tf.device(device):
                rows = gradients[0]
                note = tf.numpy_function(lambda each: sent.append(each) or each, [rows.indices], rows.indices.dtype)
                gradients[0] = tf.IndexedSlices(rows.values, tf.ensure_shape(note, [None]), rows.dense_shape)
        return send(order, made, sinks, like, *ring)

    monkeypatch.setattr("pipetrain.compute.transfers.step.reduced", noted)
    single, _ = trained(words(), OPTIMIZERS[name](), (x, y))
    pm, _ = trained(words(), OPTIMIZERS[name](), (x, y), scheme="all-reduce", devices=names(2))
    networks.assert_close(pm.get_weights(), single.get_weights())
    assert sent
    for each in sent:
        assert (len(each) == len(set(each.tolist()))) == summed


@pytest.mark.wide
@pytest.mark.parametrize("metrics", [None, ["accuracy"]])
def test_predictions_that_no_metric_reads_are_not_returned(metrics, monkeypatch):
    found, post = [], StepRunner.post

    def note(self, *given):
        post(self, *given)
        found.append(self._results[-1].predictions.tensors[0].shape)

    monkeypatch.setattr(StepRunner, "post", note)
    single, pm = networks.small(), pipetrain.PipelineModel(networks.small(), scheme="all-reduce", devices=names(2))
    logs = []
    for model in (single, pm):
        model.compile(OPTIMIZERS["momentum"](), networks.crossentropy(), metrics=metrics)
        history = networks.fit(model, *DATA, epochs=1, validation_data=DATA).history
        logs.append(networks.without_figures(history))
    rows = 0 if metrics is None else 20  # of the first minibatch
    assert found[0] == (rows, *single.output_shape[1:])
    assert logs[0].keys() == logs[1].keys()
    for key, values in logs[0].items():
        np.testing.assert_allclose(logs[1][key], values, rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("name", parameters.by_default(OPTIMIZERS, "schedule"))
def test_late_gradients_leave_the_weights_of_synchronous_training(name):
    """At an epoch's end they have been applied; a norm of all gradients lets none be late."""
    model = networks.small()
    plan = "caramel" if name == "clipped" else late_plan(model)
    single, expected = trained(networks.small(), OPTIMIZERS[name]())
    pm, history = trained(model, OPTIMIZERS[name](), scheme="all-reduce", devices=names(2), order=plan)
    networks.assert_close(pm.get_weights(), single.get_weights())
    np.testing.assert_allclose(history["val_loss"], expected["val_loss"], rtol=1e-5)
    assert bool(inside.plan(pm).late.packs) == (name != "clipped")


@pytest.mark.wide
@pytest.mark.parametrize(("scheme", "workers"), parameters.combinations(SCHEMES, (2, 3), default=[("all-reduce", 2)]))
def test_every_order_leaves_bitwise_equal_weights(scheme, workers):
    """However transfers are packed, and whatever waits for the next forward."""
    chosen = [*orders(scheme == "parameter-server")]
    if scheme == "all-reduce":
        chosen += [late_plan(networks.small()), late_plan(networks.small(), late=6, window=0)]
    else:
        chosen += [returned_plan(networks.small()), returned_plan(networks.small(), returned=6, window=0)]
    found = [trained(networks.small(), scheme=scheme, devices=names(workers), order=order)[0] for order in chosen]
    for pm in found[1:]:
        networks.assert_equal(pm.get_weights(), found[0].get_weights())


@pytest.mark.wide
@pytest.mark.parametrize(
    ("servers", "workers", "name"),
    parameters.combinations((2, 3), (3,), tuple(OPTIMIZERS), default=[(2, 3, "adam"), (3, 3, "clipped")]),
)
def test_weights_on_several_servers_are_those_of_one(servers, workers, name):
    """Bitwise, but where a norm is added up server by server; each has about as much."""
    single, _ = trained(networks.small(), OPTIMIZERS[name]())
    settings = {"scheme": "parameter-server", "devices": names(workers), "order": "tic"}
    one, _ = trained(networks.small(), OPTIMIZERS[name](), servers=1, **settings)
    asked = None if servers == workers else servers  # by default on all
    model = networks.small()
    pm, _ = trained(model, OPTIMIZERS[name](), servers=asked, **settings)
    networks.assert_close(pm.get_weights(), single.get_weights())
    if name != "clipped":
        networks.assert_equal(pm.get_weights(), one.get_weights())
    (weights,) = inside.weights(pm)
    held = [sum(4 * int(np.prod(each.shape)) for each in group.variables) for group in weights.groups]
    assert [group.device[-5:] for group in weights.groups] == [f"CPU:{n}" for n in range(servers)]
    number = {id(each): n for n, each in enumerate(model.trainable_variables)}
    layers = [{number[id(each)] for each in layer.trainable_variables} for layer in model.layers]
    assert all(
        layer <= {*group.numbers} or not layer & {*group.numbers} for layer in layers for group in weights.groups
    )
    sizes = [4 * int(np.prod(each.shape)) for each in model.trainable_variables]
    assert max(held) <= min(held) + max(sum(sizes[n] for n in layer) for layer in layers)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "servers"), parameters.combinations(tuple(OPTIMIZERS), (1, 2), default=[("schedule", 2), ("clipped", 1)])
)
def test_returned_weights_leave_those_of_the_whole_minibatch(name, servers):
    """Bitwise those of weights that are pulled, whether all are returned or some, whatever the updates."""
    single, expected = trained(networks.small(), OPTIMIZERS[name]())
    settings = {"scheme": "parameter-server", "devices": names(3), "servers": servers}
    pulled, _ = trained(networks.small(), OPTIMIZERS[name](), order="tic", **settings)
    networks.assert_close(pulled.get_weights(), single.get_weights())
    for order in ("push-pull", returned_plan(networks.small())):
        pm, history = trained(networks.small(), OPTIMIZERS[name](), order=order, **settings)
        networks.assert_equal(pm.get_weights(), pulled.get_weights())
        np.testing.assert_allclose(history["val_loss"], expected["val_loss"], rtol=1e-5)


@pytest.mark.wide
def test_workers_get_weights_that_were_set_before_they_train_on():
    weights = []
    for settings in ({}, {"scheme": "parameter-server", "devices": names(2), "order": "push-pull"}):
        model = networks.small()
        model = networks.in_way(model, **settings) if settings else model
        model.compile(OPTIMIZERS["momentum"](), networks.crossentropy())
        networks.fit(model, *DATA)
        model.set_weights([each / 2 for each in model.get_weights()])
        networks.fit(model, *DATA)
        weights.append(model.get_weights())
    networks.assert_close(*weights)


@pytest.mark.wide
def test_a_worker_without_rows_gets_the_weights_of_the_next_step():
    """Of minibatches of four rows, one, and four."""
    parts = [slice(0, 4), slice(4, 5), slice(5, 9)]
    like = tuple(tf.TensorSpec((None, *each.shape[1:]), each.dtype) for each in DATA)
    weights = []
    for settings in ({}, {"scheme": "parameter-server", "devices": names(3), "order": "push-pull"}):
        model = networks.small()
        model = networks.in_way(model, **settings) if settings else model
        model.compile(OPTIMIZERS["momentum"](), networks.crossentropy())
        rows = tf.data.Dataset.from_generator(
            lambda: (tuple(each[k] for each in DATA) for k in parts), output_signature=like
        )
        model.fit(rows, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    networks.assert_close(*weights)


def test_a_late_gradient_is_applied_with_the_rate_of_its_own_step():
    weights = []
    for settings in ({}, {"scheme": "all-reduce", "devices": names(2), "order": late_plan(networks.small())}):
        model = networks.small()
        model = networks.in_way(model, **settings) if settings else model
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())

        def set_rate(batch, logs, model=model):
            model.optimizer.learning_rate = 0.1 / (batch + 1)

        networks.fit(model, *DATA, epochs=2, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_begin=set_rate)])
        weights.append(model.get_weights())
    networks.assert_close(weights[1], weights[0])


MODELS = {
    "noisy": (noisy, DATA[0]),
    "stateful": (stateful, DATA[0]),
    "convolutional": (convolutional, networks.normal(70, 8, 8, 3)),
    "words": (words, np.random.default_rng(0).integers(0, 20, (70, 6))),
    "branching": (branching, DATA[0]),
}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "order"),
    parameters.combinations(
        tuple(MODELS),
        (*SCHEMES, "caramel"),
        default=[("noisy", "all-reduce")],
    ),
)
def test_models_train_as_replicas_of_one_stage_do(kind, order):
    """BatchNormalization sees a worker's rows and Dropout draws for them, as with replicas."""
    make, x = MODELS[kind]
    scheme = order if order in SCHEMES else "all-reduce"
    order = None if order in SCHEMES else order
    rows = {"batch_size": 10 if kind == "stateful" else 20}
    one_stage = {"scheme": "1f1b", "stages": 1, "replicas": (2,), "microbatches": 1}
    replicas, expected = trained(make(), None, (x, DATA[1]), rows, devices=names(2), **one_stage)
    pm, history = trained(make(), None, (x, DATA[1]), rows, scheme=scheme, devices=names(2), order=order)
    networks.assert_close(pm.get_weights(), replicas.get_weights())
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(SCHEMES, "all-reduce"))
def test_a_minibatch_of_fewer_rows_than_workers_trains_with_them(scheme):
    x, y = networks.data(41)  # whose last batch has one row
    single, _ = trained(networks.small(), data=(x, y))
    order = late_plan(networks.small()) if scheme == "all-reduce" else None
    pm, _ = trained(networks.small(), data=(x, y), scheme=scheme, devices=names(3), order=order)
    networks.assert_close(pm.get_weights(), single.get_weights())


@pytest.mark.wide
def test_evaluation_prediction_and_files_have_the_weights_of_all_steps(tmp_path):
    settings = {"scheme": "all-reduce", "devices": names(2), "order": late_plan(networks.small())}
    (single, _), (pm, _) = trained(networks.small()), trained(networks.small(), **settings)
    networks.assert_has_the_weights_of_all_steps(pm, single, DATA, tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "order"),
    [
        ("all-reduce", late_plan(networks.small())),  # with chunks
        ("parameter-server", "ibatch"),
        ("parameter-server", returned_plan(networks.small())),
    ],
)
def test_every_operation_of_a_step_is_on_a_device_of_its_own(scheme, order):
    """Else it would run on the controller, from which workers on other hosts cannot fetch."""
    pm, _ = trained(networks.small(), scheme=scheme, devices=names(3), order=order)
    steps = inside.runner(pm)._step._functions.values()
    free = [each for step in steps for each in step.graph.get_operations() if not each.device]
    assert {each.type for each in free} <= {"Placeholder", "ReadVariableOp", "Identity", "NoOp"}
    results = [each for each in free if each.type == "Identity"]
    assert len(results) <= 2 * len(steps)  # of the whole function, to this process


class Recorder:
    """In the place of a pipeline that sends ahead: what it is given, in order."""

    window, sends_ahead = 1, True

    def __init__(self):
        self.given = []

    def send_ahead(self, x, y, sample_weight):
        self.given.append(("send", x))

    def post(self, x, y, sample_weight, learning_rate):
        self.given.append(("post", x))

    def result(self):
        return self.given[-1][1]


def test_a_minibatch_is_sent_before_the_one_before_it_is_posted():
    def minibatches():
        yield from (Minibatch(n, None, None) for n in range(3))
        raise OSError

    pipeline = Recorder()
    window = Window(pipeline, minibatches(), None)
    assert [window.step()[1] for _ in range(3)] == [0, 1, 2]  # what was read is trained on, whatever follows it
    with pytest.raises(OSError):
        window.step()
    assert pipeline.given == [("send", 1), ("post", 0), ("send", 2), ("post", 1), ("post", 2)]
    pipeline, read = Recorder(), (Minibatch(n, None, None) for n in range(5))
    window = Window(pipeline, read, 2)
    assert [window.step()[1] for _ in range(2)] == [0, 1]
    with pytest.raises(StopIteration):
        window.step()
    assert next(read).x == 2  # an epoch reads no more than its own
    assert pipeline.given == [("send", 1), ("post", 0), ("post", 1)]


def test_rows_that_were_sent_ahead_are_taken_once_and_sent_anew_if_that_failed(monkeypatch):
    rows, x, y = WorkerRows(["CPU:0", "CPU:1"]), [tf.range(5)], tf.range(5)
    assert not rows.sends_ahead
    rows.send_ahead(x, (y, None))
    parts = rows.of(x, (y, None))
    assert [(part.worker, part.share, part.inputs[0].shape[0]) for part in parts] == [(0, 0.4, 2), (1, 0.6, 3)]
    rows.send_ahead(x, (y, None))
    assert rows.of([x[0] + 1], (y, None))[0].inputs[0][0] == 1
    rows.forget()
    sent, fails = WorkerRows.sent, [True]

    def once(self, *given):
        if fails.pop():
            raise tf.errors.UnavailableError(None, None, "Socket closed")
        return sent(self, *given)

    monkeypatch.setattr(WorkerRows, "sent", once)
    fails[:] = [False, True]
    rows.send_ahead(x, (y, None))
    assert len(rows.of(x, (y, None))) == 2
    fails[:] = [False]
    rows.send_ahead(x, (y, None))
    rows.forget()
    fails[:] = [False]
    assert len(rows.of(x, (y, None))) == 2  # nothing is on its way


def test_rows_are_sent_once_each_when_they_are_let_go(monkeypatch):
    """In the order of training: the next minibatch is given before this one is taken."""
    rows, y, given = WorkerRows(["CPU:0", "CPU:1"]), tf.range(5), list[int]()
    minibatches = [[tf.range(n, n + 5)] for n in range(5)]
    sent = WorkerRows.sent
    monkeypatch.setattr(WorkerRows, "sent", lambda self, x, *rest: given.append(int(x[0][0])) or sent(self, x, *rest))

    def step(n, following):
        rows.send_ahead(minibatches[following], (y, None))
        assert rows.of(minibatches[n], (y, None))[0].inputs[0][0] == n
        assert given[-1] == n  # not yet the next one
        rows.let_go()
        rows._ahead[-1][1].join()
        assert given[-1] == following

    step(0, 1)
    step(1, 2)
    step(3, 4)  # an epoch was stopped before the one that had been sent
    assert given == [0, 1, 2, 3, 4]
    rows.of(minibatches[4], (y, None))
    assert not rows._ahead and given == [0, 1, 2, 3, 4]


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(SCHEMES, "all-reduce"))
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(scheme, tmp_path):
    """Bitwise; snapshots on the way are those of plain Keras, late gradients included."""
    settings = (
        {"order": late_plan(networks.small())} if scheme == "all-reduce" else {"order": "push-pull", "servers": 2}
    )

    def make():
        return pipetrain.PipelineModel(networks.small(), scheme=scheme, devices=names(2), **settings)

    assert_goes_on(make, networks.small(), DATA, tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "order"),
    [("all-reduce", late_plan(networks.small())), ("parameter-server", "none"), ("parameter-server", "push-pull")],
)
def test_an_interrupt_just_after_a_step_leaves_the_weights_of_that_step(scheme, order, monkeypatch):
    """What the step had left to the next one included."""
    pm = networks.in_way(networks.small(), scheme=scheme, devices=names(2), order=order)
    assert_keeps_steps(pm, networks.small(), DATA, TransferStep, "__call__", OPTIMIZERS["momentum"], monkeypatch)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "order"),
    [("parameter-server", "tic"), ("all-reduce", late_plan(networks.small())), ("all-reduce", "layerwise")],
)
def test_messages_arrive_in_the_order_of_the_plan(scheme, order):
    """With one under way at a time; which gradients are late, the trace does not tell from those that are not."""
    model = networks.small()
    sizes = [4 * int(np.prod(each.shape)) for each in model.trainable_variables]
    settings = {"scheme": scheme, "devices": names(2), "servers": 1 if scheme == "parameter-server" else None}
    pm = networks.in_way(model, order=order, **settings)
    pm.compile("sgd", networks.crossentropy())
    pm.exact_trace = True
    networks.fit(pm, *DATA)
    plan = inside.plan(pm)
    if order == "tic":
        one_at_a_time = Plan(Phase(plan.pulls.packs, 1), Phase(plan.pushes.packs, 1))
        pm = networks.in_way(model, order=one_at_a_time, **settings)
        pm.compile("sgd", networks.crossentropy())
        pm.exact_trace = True
        networks.fit(pm, *DATA)
    trace = pm.trace
    assert len(trace.spans) == 2 * 4 and set(trace.spans.op) == {"FB"}
    assert all(each.total_s <= trace.duration_s for each in pipetrain.idle(trace).values())
    not_late = trace.transfers.pack >= len(plan.late.packs)
    assert plan.name == "layer by layer" or not (inverted(trace.transfers) & not_late).any()
    ways = {"W": plan.pulls.packs, "R": plan.pushes.packs}
    for op, packs in ways.items() if scheme == "parameter-server" else ():
        sent = trace.transfers[trace.transfers.op == op]
        assert sent.size_bytes.sum() == 4 * sum(sizes)
        for step in range(4):
            mine = sent[sent.microbatch == step]
            arrived = [size for _, size in sorted(zip(mine.end_s, mine.size_bytes))]
            assert arrived == [pack.size_bytes for pack in packs]
            assert (mine.end_s >= mine.start_s).all()
    if scheme == "all-reduce":  # each device sends all of its gradients; those of the last step are flushed unrecorded
        late = sum(sizes[n] for n in plan.late_variables)
        assert trace.transfers.size_bytes.sum() == 2 * (4 * sum(sizes) - late)


@pytest.mark.wide
def test_weights_are_returned_when_they_are_updated():
    """Each layer's, after its gradients have arrived, in each step, and without waiting for any other update."""
    model = networks.small()
    pm = pipetrain.PipelineModel(
        model, scheme=pipetrain.ParameterServer(order="push-pull", servers=1), devices=names(2)
    )
    pm.compile("sgd", networks.crossentropy())
    pm.exact_trace = True
    networks.fit(pm, *DATA)
    sent, packs = pm.trace.transfers, inside.plan(pm).returned.packs
    assert len(sent) == 2 * 4 * len(packs)
    for step in range(4):
        weights, gradients = (sent[(sent.op == op) & (sent.microbatch == step)] for op in "WR")
        for mine, sink in ((weights, 1), (gradients, 0)):
            assert (mine.to_replica == sink).all()
            assert sorted(zip(mine.pack, mine.size_bytes)) == [(n, pack.size_bytes) for n, pack in enumerate(packs)]
        left_s = dict(zip(gradients.pack, gradients.start_s))
        assert all(start_s >= left_s[n] for n, start_s in zip(weights.pack, weights.start_s))
    step, (server,) = inside.runner(pm)._step, inside.weights(pm)
    (graph,) = (
        function.graph for key, function in step._functions.items() if isinstance(key, tuple) and key[0] == (0, 1)
    )
    inner = {id(outer): placeholder for outer, placeholder in graph.captures}

    def writing(variable):
        return next(op for op in inner[id(variable.handle)].consumers() if "Apply" in op.type or "Assign" in op.type)

    updates = {writing(each.value): n for n, each in enumerate(server.variables)}
    for pack in packs:
        for n in pack.variables:
            needed = {updates[op] for op in before(writing(step._returned[1][n])) if op in updates}
            assert needed == {*pack.variables}


def before(operation):
    """All operations that have ended when this one begins."""
    found, waiting = set(), [operation]
    while waiting:
        last = waiting.pop()
        more = {*last.control_inputs, *(each.op for each in last.inputs)} - found
        found |= more
        waiting += more
    return found


def test_each_server_sends_the_weights_that_it_has():
    """One at a time, in the order of the plan."""
    model = networks.small()
    packs = tuple(Pack((n,), 4 * int(np.prod(each.shape))) for n, each in enumerate(model.trainable_variables))
    one_at_a_time = Plan(Phase(packs, 1), Phase(packs[::-1], 1))
    pm = pipetrain.PipelineModel(model, scheme=pipetrain.ParameterServer(order=one_at_a_time), devices=names(2))
    pm.compile("sgd", networks.crossentropy())
    pm.exact_trace = True
    networks.fit(pm, *DATA)
    (weights,), steps, sent = inside.weights(pm), 4, pm.trace.transfers
    for server, group in enumerate(weights.groups):
        held = sum(4 * int(np.prod(each.shape)) for each in group.variables)
        assert sent.size_bytes[(sent.op == "W") & (sent.from_replica == server)].sum() == steps * held
        assert sent.size_bytes[(sent.op == "R") & (sent.to_replica == server)].sum() == steps * held
    assert not inverted(sent).any()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"scheme": "vanilla", "order": "tic"}, "Only all-reduce and parameter-server order.*scheme='vanilla'"),
        ({"scheme": "all-reduce", "order": "fastest"}, "Unknown order.*'fastest'.*auto, none, layerwise, tic"),
        ({"scheme": "parameter-server", "order": "caramel"}, "Unknown order.*'caramel'"),
        ({"scheme": "all-reduce", "servers": 2}, "Only the scheme 'parameter-server' has servers.*servers=2"),
        ({"scheme": "parameter-server", "servers": 0}, "on one server or more. Received: servers=0"),
        ({"scheme": "parameter-server", "devices": names(2), "servers": 3}, "servers=3, 2 workers. Try servers=2"),
        ({"scheme": "all-reduce", "cuts": ("d1",)}, "all-reduce has the whole model on every device"),
        ({"scheme": "all-reduce", "replicas": (2,)}, "has no stages to replicate"),
        ({"scheme": "all-reduce", "recompute": True}, "Only stages run their forward again"),
        ({"scheme": "all-reduce", "microbatches": 2}, "does not split a minibatch"),
        ({"scheme": "all-reduce", "stages": 0}, "a copy of the model on every device. Received: stages=0"),
        ({"scheme": "parameter-server", "stages": 2, "devices": ("CPU:0",)}, "stages=2, devices="),
    ],
)
def test_what_these_schemes_do_not_have_is_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        networks.in_way(networks.small(), **settings)


def test_a_plan_of_another_model_is_refused_before_training():
    pm = pipetrain.PipelineModel(networks.small(), scheme=pipetrain.AllReduce(order=late_plan(networks.mlp())))
    pm.compile("sgd", networks.crossentropy())
    with pytest.raises(ValueError, match="Every variable is sent once"):
        networks.fit(pm, *DATA)
    pm = pipetrain.PipelineModel(networks.small(), scheme=pipetrain.AllReduce(order=3))
    pm.compile("sgd", networks.crossentropy())
    with pytest.raises(TypeError, match="An order of transfers is a name or a Plan"):
        networks.fit(pm, *DATA)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_begins_when_what_was_written_to_variables_is_there(scheme, monkeypatch):
    """Weights, from the beginning and after a drain, and every new learning rate: on all devices before the step."""
    events, step = [], TransferStep.__call__

    def called(self, *arguments, **settings):
        events.append("step")
        return step(self, *arguments, **settings)

    monkeypatch.setattr(TransferStep, "__call__", called)
    monkeypatch.setattr(stepwise, "finish", lambda device: events.append(device[-5:]))
    pm = networks.in_way(networks.small(), scheme=scheme, devices=names(2), order="none")
    pm.compile(keras.optimizers.SGD(0.1), networks.crossentropy())
    halve = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(pm.optimizer, "learning_rate", 0.05) if batch == 1 else None
    )
    networks.fit(pm, *DATA, callbacks=[halve])
    both = list(names(2))
    assert both[0] in events[: events.index("step")] and both[1] in events[: events.index("step")]
    later = events[events.index("step") :]
    assert later.count("step") == 4
    assert later[: later.index(both[0])].count("step") == 2
    assert later[later.index(both[0]) :][:2] == both


def test_dynamic_loss_scaling_is_refused():
    pm = pipetrain.PipelineModel(networks.small(), scheme="all-reduce", devices=names(2))
    with pytest.raises(ValueError, match=r"Dynamic loss scaling is not supported here.*scheme='all-reduce'"):
        pm.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), networks.crossentropy())
