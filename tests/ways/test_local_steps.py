"""Workers that update weights of their own, and join them after so many steps."""

from __future__ import annotations

import itertools

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from checkpointed import BATCH, STEPS, assert_goes_on_bitwise
from checkpointed import run as checkpointed
from transfer_models import convolutional, words

import pipetrain
from pipetrain.compute.transfers.step import TransferStep
from pipetrain.schemes.synchrony import LocalSGD
from pipetrain.schemes.transfers.plan import Pack, Phase, Plan
from pipetrain.simulation.data_parallel import simulate_plan

DEVICES = ("CPU:0", "CPU:1", "CPU:2")
DATA = networks.data(70)
NESTEROV = LocalSGD(steps=4, rate=0.7, momentum=0.9)


def trained(synchrony=None, data=DATA, make=networks.small, optimizer=None, devices=DEVICES, rows=20, **settings):
    """Two epochs, whose last minibatch is short."""
    keras.utils.set_random_seed(0)
    settings = {"order": "none", "synchrony": synchrony, "devices": devices, "stages": None, **settings}
    pm = networks.pipeline(make(), optimizer, scheme="all-reduce", **settings)
    networks.fit(pm, *data, epochs=2, batch_size=rows)
    return pm.get_weights()


@pytest.mark.parametrize(
    ("steps", "joined", "mixing"),
    [
        pytest.param(3, {3: [0, 1]}, None, id="whole"),
        pytest.param(3, {1: [0], 3: [1]}, None, id="two fragments"),
        pytest.param(4, {2: [0], 4: [1]}, None, id="none is joined last", marks=pytest.mark.wide),
        pytest.param(3, {1: [0], 3: [1]}, 0.25, id="a step later"),
        pytest.param(3, {3: [0, 1]}, 0.0, id="whole a step later", marks=pytest.mark.wide),
    ],
)
def test_weights_are_those_of_a_straight_line_of_numpy(steps, joined, mixing):
    """Two layers without biases, two devices, the mean squared error, SGD; seven steps in an epoch, whose end drains.

    ``joined`` has the layers that are joined, by the step of each period; a drain joins those that the last step has
    not. With a ``mixing`` that is by the weights that the next step begins with, whose own are then mixed.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(56, 8)).astype("float32"), rng.normal(size=(56, 4)).astype("float32")
    layers = [keras.layers.Dense(6, use_bias=False), keras.layers.Dense(4, use_bias=False)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    before, rate = [layer.get_weights()[0].astype(np.float64) for layer in layers], 0.1
    later = {} if mixing is None else {"overlap": True, "mixing": mixing}
    options = LocalSGD(steps=steps, rate=0.7, momentum=0.5, fragments=len(joined), **later)
    way = pipetrain.AllReduce(order="none", synchrony=options)
    pm = pipetrain.PipelineModel(model, scheme=way, devices=DEVICES[:2])
    pm.compile(keras.optimizers.SGD(rate), "mse")
    pm.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    own, momentum = [[*before] for _ in range(2)], [0.0, 0.0]

    def join(layers, moving):
        for n in layers:
            moved = before[n] - sum(each[n] for each in moving) / 2
            momentum[n] = 0.5 * momentum[n] + moved
            before[n] = before[n] - 0.7 * (moved + 0.5 * momentum[n])

    def take(layers, mixing):
        for n, each in itertools.product(layers, own):
            each[n] = mixing * each[n] + (1 - mixing) * before[n]

    for step in [*range(1, 8)] * 2:
        made = step if mixing is None else step - 1
        due = joined.get((made - 1) % steps + 1, []) if made else []
        begun = [[*each] for each in own]
        for worker, (first, second) in enumerate(own):
            rows = slice(8 * step + 4 * worker - 8, 8 * step + 4 * worker - 4)
            hidden = x[rows] @ first
            error = (hidden @ second - y[rows]) * 2 / (4 * 4)
            own[worker] = [first - rate * x[rows].T @ error @ second.T, second - rate * hidden.T @ error]
        join(due, own if mixing is None else begun)
        take(due, mixing or 0.0)
        if step == 7:
            apart = [n for n in range(2) if n not in due or mixing]
            join(apart, own)
            take(apart, 0.0)
    for layer, expected in zip(layers, before, strict=True):
        np.testing.assert_allclose(layer.get_weights()[0], expected, rtol=1e-4, atol=1e-6)


def test_an_average_after_every_step_is_no_other_training():
    whole = trained()
    networks.assert_equal(trained("local:1"), whole)
    equal = {"data": networks.data(60), "optimizer": keras.optimizers.SGD(0.05), "rows": 15}  # five for each worker
    barely = trained(LocalSGD(steps=1, rate=1 - 1e-7), **equal)
    networks.assert_close(barely, trained(**{**equal, "optimizer": keras.optimizers.SGD(0.05)}))


def test_one_worker_trains_as_plain_keras():
    single = networks.compiled("keras")
    networks.fit(single, *DATA, epochs=2)
    networks.assert_close(trained("local:2", devices=DEVICES[:1]), single.get_weights(), 1e-4)


@pytest.mark.parametrize("make", [networks.small, pytest.param(convolutional, marks=pytest.mark.wide)])
def test_weights_do_not_depend_on_the_order(make):
    data = DATA
    if make is convolutional:
        rng = np.random.default_rng(0)
        data = rng.normal(size=(70, *make().input_shape[1:])).astype("float32"), np.arange(70) % 5
    whole = trained("local:3", data, make)
    networks.assert_equal(trained("local:3", data, make, order="caramel"), whole)


@pytest.mark.wide
def test_rows_of_embeddings_are_updated_by_each_worker():
    data = np.arange(60 * 6).reshape(60, 6) % 20, np.arange(60) % 5
    weights = trained(LocalSGD(steps=1, rate=1 - 1e-7), data, words, keras.optimizers.SGD(0.05), rows=15)
    networks.assert_close(weights, trained(None, data, words, keras.optimizers.SGD(0.05), rows=15))


@pytest.mark.parametrize(
    ("synchrony", "joined"),
    [
        (LocalSGD(4, 0.7, 0.9, 2), [None, 0, None, 1] * 2),
        (LocalSGD(3, 0.7, 0.9, 3), [0, 1, 2] * 2),
        (LocalSGD(4, 0.7, 0.9, 2, overlap=True, mixing=0), [None, None, 0, None, 1, None, 0, None]),
    ],
    ids=str,
)
def test_a_step_joins_one_fragment_and_changes_its_residuals_alone(synchrony, joined, monkeypatch):
    """And sends its bytes alone, those that the simulator says of the same plan."""
    keras.utils.set_random_seed(0)
    options = {"synchrony": synchrony, "compression": "int4", "order": "layerwise"}
    pm = networks.in_way(networks.small(), scheme="all-reduce", devices=DEVICES, **options)
    pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
    pm.exact_trace, alike, changed, residuals = True, [], [], {}
    strategy, step = inside.strategy(pm), TransferStep.__call__

    def looked_at(*arguments, **settings):
        """Note which weights are the same on all workers after the step, and the residuals that it has changed."""
        made = step(*arguments, **settings)
        weights = zip(*([each.numpy() for each in mine.variables] for mine in strategy._weights), strict=True)
        alike.append({n for n, (first, *others) in enumerate(weights) if all((first == o).all() for o in others)})
        of = {id(each): n for n, each in enumerate(strategy._segment.trainable_variables)}
        found = {(of[id(each.weight)], each.kind): each.variable.numpy() for each in strategy._compressor.slots()}
        changed.append({key[0] for key, value in found.items() if (value != residuals.get(key, 0)).any()})
        residuals.update(found)
        return made

    monkeypatch.setattr(TransferStep, "__call__", looked_at)
    x, y = networks.data(15 * len(joined))
    pm.fit(x, y, batch_size=15, epochs=1, shuffle=False, verbose=0)
    numbers = {None: set(), **{n: {*each} for n, each in enumerate(strategy._outer.fragments)}}
    assert sorted(n for each in numbers.values() for n in each) == [*range(len(strategy._segment.trainable_variables))]
    assert alike == [numbers[fragment] for fragment in joined]
    for fragment, each in zip(joined, changed, strict=True):
        assert each <= numbers[fragment] and bool(each) == (fragment is not None)
    sizes = strategy._gradient_bytes()
    expected = [6 * sum(sizes[n] for n in numbers[fragment]) for fragment in joined]  # each worker sends to two others
    assert sent_bytes(pm.trace, len(joined)) == expected and pm.trace.period == synchrony.steps
    assert sent_bytes(simulate_plan(strategy._setting(15), strategy.plan, len(joined)), len(joined)) == expected


def sent_bytes(trace, steps):
    """Of each step."""
    return [int(trace.transfers.size_bytes[trace.transfers.microbatch == step].sum()) for step in range(steps)]


@pytest.mark.parametrize(
    ("devices", "mixing", "compression"),
    [
        (2, 0.5, "sign"),
        *parameters.widely((1, 0.9, "top-k:0.2"), (2, 0.9, "top-k:0.2"), (3, 0.25, "int4"), (2, 0.0, "sign")),
    ],
)
def test_what_was_sent_and_what_is_left_are_all_moves(devices, mixing, compression):
    """Those without compression, of a loss whose gradients do not depend on weights; seven steps, then a drain."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(56, 8)).astype("float32"), rng.normal(size=(56, 5)).astype("float32")
    found = []
    for each in (None, compression):
        keras.utils.set_random_seed(0)
        given = keras.Input((8,))
        both = [keras.layers.Dense(units, use_bias=False)(given) for units in (3, 2)]
        model = keras.Model(given, keras.layers.concatenate(both))
        options = LocalSGD(steps=3, fragments=2, overlap=True, mixing=mixing)
        way = pipetrain.AllReduce(order="none", synchrony=options, compression=each)
        pm = pipetrain.PipelineModel(model, scheme=way, devices=DEVICES[:devices])
        pm.compile(keras.optimizers.SGD(1.0), lambda y, output: keras.ops.mean(y * output, axis=-1))
        pm.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        left = {id(weight): np.zeros(weight.shape) for weight in model.weights}
        for slot in inside.strategy(pm)._stages.slots():
            if slot.kind.startswith("residual_of_moves"):
                left[id(slot.weight)] += slot.variable.numpy() / devices
        assert all(rest.any() == (each is not None) for rest in left.values())
        found.append([weight.numpy() - left[id(weight)] for weight in model.weights])
    networks.assert_close(*found, 1e-5)


def test_steps_are_counted_on_after_a_snapshot_and_anew_after_an_epoch(monkeypatch):
    keras.utils.set_random_seed(0)
    pm = networks.in_way(networks.small(), scheme="all-reduce", devices=DEVICES, order="none", synchrony="local:3")
    pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
    joined, step = [], TransferStep.__call__

    def noted(*arguments, joins=None, **settings):
        joined.append(joins)
        return step(*arguments, joins=joins, **settings)

    monkeypatch.setattr(TransferStep, "__call__", noted)
    looks = [pipetrain.callbacks.Snapshots(2, lambda *given: None)]
    pm.fit(*networks.data(60), batch_size=15, epochs=2, shuffle=False, verbose=0, callbacks=looks)
    assert joined == [None, None, 0, None] * 2


@pytest.mark.parametrize("compression", [None, pytest.param("int4", marks=pytest.mark.wide)])
@pytest.mark.parametrize("fragments", [{}, {"fragments": 2}, {"fragments": 2, "overlap": True}])
@pytest.mark.wide
def test_a_run_that_is_stopped_goes_on_bitwise(fragments, compression, tmp_path):
    """Checkpoints every four steps are in the midst of periods of three."""
    synchrony = LocalSGD(steps=3, rate=0.7, momentum=0.9, **fragments)
    way = {"scheme": "all-reduce", "devices": DEVICES, "order": "none", "synchrony": synchrony}
    way["compression"] = compression
    assert_goes_on_bitwise(tmp_path, **way)


@pytest.mark.wide
def test_a_short_run_with_fragments_and_overlap_that_is_stopped_goes_on_bitwise(tmp_path):
    """Epochs of five steps; the checkpoint is after the second step of the third one, in the midst of a period."""
    synchrony = LocalSGD(steps=3, rate=0.7, momentum=0.9, fragments=2, overlap=True)
    way = {"scheme": "all-reduce", "devices": DEVICES[:2], "stages": 2, "order": "none", "synchrony": synchrony}
    x, y = networks.data(5 * BATCH)
    assert_goes_on_bitwise(tmp_path, data=lambda: {"x": x, "y": y, "batch_size": BATCH}, compression="int4", **way)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        pytest.param(lambda: keras.optimizers.Adam(0.01), marks=pytest.mark.wide),
    ],
)
@pytest.mark.wide
def test_checkpoints_at_joins_change_nothing(make, tmp_path):
    """Each worker's optimizer keeps what it has gathered through a drain, and through a resume."""
    way = {"scheme": "all-reduce", "devices": DEVICES, "order": "none", "synchrony": "local:2"}
    whole, _ = checkpointed(tmp_path / "whole", optimizer=make(), every_steps=None, **way)
    often, _ = checkpointed(tmp_path / "often", optimizer=make(), every_steps=2, **way)
    _, history = checkpointed(tmp_path / "stopped", stop_after=STEPS + 3, optimizer=make(), every_steps=4, **way)
    assert history is None
    again, _ = checkpointed(tmp_path / "stopped", optimizer=make(), every_steps=4, **way)
    for pm in (often, again):
        networks.assert_equal(trained_weights(pm), trained_weights(whole))


def trained_weights(pm):
    return [each.numpy() for each in pm.model.trainable_variables]


def test_a_look_at_weights_joins_them_once():
    """An outer step with momentum moves weights even where workers have not moved: there is one at most at a step."""
    x, y = networks.data(60)
    found = []
    for after in (False, True):
        keras.utils.set_random_seed(0)
        pm = networks.in_way(networks.small(), scheme="all-reduce", devices=DEVICES, order="none", synchrony=NESTEROV)
        pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
        looks = [pipetrain.callbacks.Snapshots(3, lambda *given: None)] if after else []
        pm.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0, callbacks=looks)
        found.append(pm.get_weights())
    networks.assert_equal(*found)  # the look is at the epoch's end, where workers are joined anyway


@pytest.mark.parametrize("compression", [None, pytest.param("random-k:0.3", marks=pytest.mark.wide)])
def test_workers_without_rows_are_at_the_same_step(compression):
    """The last minibatch has one row, which one of three workers has; all go on with the same random numbers."""
    keras.utils.set_random_seed(0)
    way = {"order": "none", "synchrony": "local:2", "compression": compression, "devices": DEVICES}
    pm = networks.in_way(networks.small(), scheme="all-reduce", **way)
    pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
    x, y = networks.data(61)
    pm.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    assert len({int(w.groups[0].optimizer.iterations) for w in inside.strategy(pm)._weights}) == 1
    first, *others = ([each.numpy() for each in w.variables] for w in inside.strategy(pm)._weights)
    for other in others:
        networks.assert_equal(other, first)


def test_a_loss_that_is_a_sum_takes_as_long_steps_as_without():
    data = networks.data(60)
    loss = networks.crossentropy(reduction="sum")
    found = []
    for synchrony in (None, LocalSGD(steps=1, rate=1 - 1e-7)):
        keras.utils.set_random_seed(0)
        pm = networks.in_way(networks.small(), scheme="all-reduce", devices=DEVICES, order="none", synchrony=synchrony)
        pm.compile(keras.optimizers.SGD(0.001), loss)
        networks.fit(pm, *data, batch_size=15)
        found.append(pm.get_weights())
    networks.assert_close(*found)


@pytest.mark.wide
def test_what_changes_is_told_where_a_run_goes_on(tmp_path, capsys):
    way = {"scheme": "all-reduce", "devices": DEVICES, "order": "none"}
    checkpointed(tmp_path, stop_after=STEPS + 3, compression="top-k:0.2", **way)
    checkpointed(tmp_path, compression="int4", synchrony="local:2", verbose=2, **way)
    said = capsys.readouterr().out
    assert "compression int4 instead of top-k:0.2" in said and "synchrony local:2 instead of None" in said
    assert "of_worker" not in said


def test_keras_backup_is_refused(tmp_path):
    with pytest.raises(ValueError, match="PipelineCheckpoint"):
        pm = networks.in_way(networks.small(), scheme="all-reduce", devices=DEVICES, compression="top-k")
        pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
        networks.fit(pm, *networks.data(20), callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Only all-reduce"):
        networks.in_way(networks.small(), scheme="parameter-server", synchrony="local:2")
    with pytest.raises(ValueError, match="Unknown synchrony"):
        pipetrain.AllReduce(synchrony="seldom")
    wrong = [{"steps": 0}, {"rate": 0}, {"momentum": 1.0}, {"fragments": 0}, {"fragments": 9, "steps": 8}]
    wrong += [{"overlap": "late"}, {"mixing": 1.0, "overlap": True}]
    for options in wrong:
        with pytest.raises(ValueError, match=f"Received: {next(iter(options))}=.*Try {next(iter(options))}="):
            LocalSGD(**options)
    with pytest.raises(ValueError, match=r"mixing=0.2, overlap=False. Try overlap=True"):
        LocalSGD(mixing=0.2)
    with pytest.raises(ValueError, match=r"steps=1, overlap=True, mixing=0. Try mixing=0.5, or steps=8"):
        LocalSGD(1, overlap=True, mixing=0)
    with pytest.raises(ValueError, match=r"fragments=5, for a model of 3 layers .*Try fragments=3"):
        trained(LocalSGD(8, fragments=5))
    late = Plan(Phase(), Phase((Pack((0, 1, 2, 3), 4),)), Phase((Pack((4, 5), 4),)))
    with pytest.raises(ValueError, match="nothing late"):
        trained("local:2", order=late)


def of_open_shape(known):
    """Minibatches without end, whose data tell the length of a row's sequence or leave it open."""
    x = np.random.default_rng(0).normal(size=(8, 5, 4)).astype("float32")
    specs = tf.TensorSpec((8, 5 if known else None, 4)), tf.TensorSpec((8, 1))
    return tf.data.Dataset.from_generator(lambda: iter([(x, np.ones((8, 1)))] * 8), output_signature=specs)


@pytest.mark.parametrize("synchrony", [None, "local:2"])
def test_where_the_first_minibatch_tells_the_shapes_weights_are_the_same(synchrony):
    """Workers begin with what the compiled optimizer has gathered, also if they are made only then."""
    found = []
    for known in (True, False):
        keras.utils.set_random_seed(1)
        dense, pool = keras.layers.Dense(4), keras.layers.GlobalAveragePooling1D()
        model = keras.Sequential([keras.Input((None, 4)), dense, pool, keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        model.compile(optimizer, "mse")
        model.fit(np.ones((8, 5, 4)), np.ones((8, 1)), epochs=2, verbose=0)
        pm = networks.in_way(model, scheme="all-reduce", devices=DEVICES[:2], order="none", synchrony=synchrony)
        pm.compile(optimizer, "mse")
        pm.fit(of_open_shape(known), epochs=1, verbose=0)
        found.append(pm.get_weights())
    networks.assert_equal(*found)
