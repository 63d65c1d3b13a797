"""Replicated stages: the same training as without, whatever their number and the rows that each gets."""

from __future__ import annotations

import sys
import threading
import time
from concurrent import futures
from fractions import Fraction
from functools import cache

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from graph_models import compiled, many_inputs_and_outputs, tokens_and_numbers

import models
import pipetrain
from pipetrain.compute.functions.stage import Stage
from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.partition import plan
from pipetrain.run import channels
from pipetrain.run.channels import joined, take
from pipetrain.schemes.splitting import reduction_bytes, rows_of, shared_out
from pipetrain.simulation.simulator import simulate
from pipetrain.trace.trace import Trace

L = keras.layers
SCHEMES = ["vanilla", "weight-stashing", "vertical-sync", "spectrain", "gpipe", "1f1b"]


def trained(scheme, replicas, rows=100, **settings):
    """Weights and history of the MLP in three stages; batches of 16 rows, the last of four."""
    x, y = networks.data(rows)
    pm = networks.pipeline(cuts=networks.cuts(6, 3), scheme=scheme, replicas=replicas, **settings)
    history = pm.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, sample_weight=np.linspace(0.5, 1.5, rows))
    return pm.get_weights(), networks.without_figures(history.history)


@cache
def without_replicas(scheme, **settings):
    """Trained once for all numbers of replicas."""
    return trained(scheme, None, **settings)


UNEVEN = [("spectrain", (1, 3, 2)), ("gpipe", (1, 3, 2))]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "replicas"), parameters.combinations(SCHEMES, [(2, 1, 1), (1, 3, 2)], default=UNEVEN)
)
def test_weights_and_history_are_those_without_replicas(scheme, replicas):
    """Uneven parts and a last batch with fewer rows than some microbatch has replicas."""
    microbatches = {"microbatches": 3} if scheme in ("gpipe", "1f1b") else {}
    expected, history = without_replicas(scheme, **microbatches)
    got, its_history = trained(scheme, replicas, **microbatches)
    networks.assert_close(got, expected)
    for key, values in history.items():
        np.testing.assert_allclose(its_history[key], values, rtol=1e-5, err_msg=key)


@pytest.mark.slow  # 25 s; test_graphs trains them without replicas by default
def test_masks_dictionaries_embeddings_and_several_losses():
    """Sparse gradients are summed as sparse gradients; masks are cut with their rows."""
    x, y = tokens_and_numbers()
    weights = []
    for replicas in (None, (2, 3, 1, 2)):
        keras.utils.set_random_seed(0)
        pm = pipetrain.PipelineModel(
            many_inputs_and_outputs(), stages=4, scheme="1f1b", microbatches=2, replicas=replicas
        )
        compiled(pm)
        pm.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
        weights.append(pm.get_weights())
    networks.assert_close(weights[1], weights[0])


@pytest.mark.parametrize(
    "reduction", parameters.by_default(["sum_over_batch_size", "sum"], wide=["sum_over_batch_size", "sum"])
)
def test_regularizers_and_sums_count_once(reduction):
    x, y, weights, losses = *networks.data(50), [], []
    for replicas in (None, (3, 2)):
        keras.utils.set_random_seed(0)
        layers = [L.Dense(8, kernel_regularizer=keras.regularizers.L2(0.1)), L.Dense(5, bias_regularizer="l1")]
        model = keras.Sequential([keras.Input((networks.FEATURES,)), *layers])
        pm = pipetrain.PipelineModel(model, stages=2, scheme="vanilla", replicas=replicas)
        pm.compile(keras.optimizers.SGD(0.01, momentum=0.9), networks.crossentropy(reduction=reduction))
        losses.append(pm.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"])
        weights.append(pm.get_weights())
    networks.assert_close(weights[1], weights[0])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(["spectrain", "1f1b"], "spectrain"))
def test_equal_seeds_give_equal_weights_whatever_the_timing(scheme, monkeypatch):
    keras.utils.set_random_seed(0)
    weights, rng = [], np.random.default_rng(0)
    for delayed in (False, True):
        if delayed:
            for name in ("forward", "backward", "update"):
                original = getattr(Stage, name)

                def late(self, *args, original=original):
                    time.sleep(rng.uniform(0, 0.01))
                    return original(self, *args)

                monkeypatch.setattr(Stage, name, late)
        weights.append(trained(scheme, (2, 3, 1))[0])
    networks.assert_equal(weights[0], weights[1])


@pytest.mark.wide
def test_replicas_of_a_stage_stay_bitwise_equal():
    x, y = networks.data(100)
    pm = networks.pipeline(cuts=networks.cuts(6, 3), replicas=(3, 2, 1))
    pm.fit(x, y, batch_size=16, verbose=0)
    for first, *others in inside.replicas(pm):
        for other in others:
            networks.assert_equal(other.weights(), first.weights())


@pytest.mark.wide
def test_an_exception_in_a_replica_names_it_and_leaves_no_thread(monkeypatch):
    inside.by_threads(monkeypatch)
    x, y = networks.data(100)
    pm = networks.pipeline(cuts=networks.cuts(6, 3), replicas=(2, 2, 2))
    pm.fit(x, y, batch_size=16, verbose=0)
    original = Stage.backward
    for stage, replica in ((0, 1), (1, 0), (2, 1)):
        broken = inside.replicas(pm)[stage][replica]

        def backward(self, *args, broken=broken):
            if self is broken:
                raise KeyError("boom")
            return original(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Stage, "backward", backward)
            with pytest.raises(KeyError, match="boom") as caught:
                pm.fit(x, y, batch_size=16, verbose=0)
        assert f"stage {stage}, replica {replica}, backward of minibatch 0" in "\n".join(caught.value.__notes__)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipetrain")]
        assert np.isfinite(pm.fit(x, y, batch_size=16, verbose=0).history["loss"]).all()


def test_statistics_are_averaged_and_dropout_differs_between_replicas():
    """BatchNormalization sees a replica's rows only: documented, and what MirroredStrategy does."""
    keras.utils.set_random_seed(0)
    layers = [L.BatchNormalization(momentum=0.0, name="norm"), L.Dropout(0.5, seed=1, name="drop"), L.Dense(1)]
    pm = pipetrain.PipelineModel(
        keras.Sequential([keras.Input((1,)), *layers]), cuts=("drop",), scheme="vanilla", replicas=(2, 1)
    )
    pm.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.array([[0.0], [2.0], [10.0], [14.0]], "float32")
    pm.fit(x, x, batch_size=4, verbose=0, shuffle=False)
    np.testing.assert_allclose(pm.model.get_layer("norm").moving_mean, [(1 + 12) / 2])
    np.testing.assert_allclose(pm.model.get_layer("norm").moving_variance, [(1 + 4) / 2])
    seeds = [replica._state.values[-1].numpy() for replica in inside.replicas(pm)[0]]
    assert seeds[0][0] != seeds[1][0]


@pytest.mark.measures
@pytest.mark.slow  # 14 s; a smaller network's partition brings its replicas by default
def test_vgg16_with_the_replicas_that_the_planner_gives_it():
    """Four devices: convolutions are slow and light, the dense layers fast and heavy (arXiv 1809.02839, section 3)."""
    costs = pipetrain.profile(
        models.build("vgg16", (32, 32, 3), 10, width=4), batch_size=32, verbose=False, budget_s=None
    )
    slow_link = Cluster((Level(Link(20e6, 1e-5)),))
    hybrid = pipetrain.partition(costs, 4, slow_link, replicate=True)
    assert hybrid.replicas[0] > 1
    assert hybrid.slowest_s < pipetrain.partition(costs, 4, slow_link).slowest_s
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(320, 32, 32, 3)).astype("float32"), rng.integers(0, 10, 320)
    trained = []
    for replicas in (hybrid.replicas, (1,) * len(hybrid.stages)):
        keras.utils.set_random_seed(0)
        model = models.build("vgg16", (32, 32, 3), 10, width=4)
        pm = pipetrain.PipelineModel(model, cuts=hybrid.cuts, scheme="1f1b", microbatches=2, replicas=replicas)
        pm.compile(keras.optimizers.SGD(1e-3, momentum=0.9), networks.crossentropy())
        pm.fit(x, y, batch_size=32, shuffle=False, verbose=0)
        trained.append(pm.get_weights())
    networks.assert_close(trained[0], trained[1], 1e-4)


@pytest.mark.wide
def test_a_partition_brings_its_replicas():
    keras.utils.set_random_seed(0)
    model = networks.mlp()
    cut = plan(pipetrain.profile(model, 16, verbose=False, budget_s=None), [4, 6], replicas=[2, 1])
    pm = pipetrain.PipelineModel(model, stages=cut, scheme="vanilla")
    assert pm.partition().replicas == (2, 1)
    assert inside.layout(pm).replicas == (2, 1)


@pytest.mark.wide
def test_traces_have_a_row_per_replica(tmp_path):
    x, y = networks.data(100)
    pm = networks.pipeline(cuts=networks.cuts(6, 3), replicas=(2, 1, 1))
    pm.fit(x, y, batch_size=16, verbose=0)
    assert pm.trace.rows == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert pm.trace.row_names()[:3] == ["stage 0, replica 0", "stage 0, replica 1", "stage 1"]
    pm.trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json").rows == pm.trace.rows
    assert 0 <= pm.trace.bubble() < 1


def test_what_has_no_batch_cannot_cross_from_a_replicated_stage():
    x = keras.Input((3,))
    wide = L.Lambda(lambda x: tf.transpose(x), output_shape=(None,), name="turn")(L.Dense(3)(x))
    model = keras.Model(x, L.Dense(2)(L.Lambda(lambda x: tf.transpose(x), output_shape=(3,))(wide)))
    pm = pipetrain.PipelineModel(model, cuts=("turn",), scheme="vanilla", replicas=(1, 2))
    pm.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"must have the batch first.*Received: a tensor of shape \(3, None\)"):
        pm.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)


@pytest.mark.parametrize(("rows", "replicas", "expected"), [(5, 2, [2, 3]), (4, 4, [1] * 4), (1, 3, [0, 0, 1])])
def test_rows_are_shared_as_evenly_as_can_be(rows, replicas, expected):
    parts = [rows_of(rows, replica, replicas) for replica in range(replicas)]
    assert [len(part) for part in parts] == expected
    assert [row for part in parts for row in part] == list(range(rows))
    assert joined([None, None]) is None


@pytest.mark.wide
@pytest.mark.parametrize("settings", [{"replicas": (1, 2)}, {"microbatches": 2}])
def test_a_loss_that_cannot_be_put_together_is_refused(settings):
    """A mean over what a mask leaves that weights decide on: replicas of the last stage once trained it wrongly."""
    numbers = keras.Input((6, 2))
    x = L.LSTM(4, return_sequences=True, name="recurrent")(L.Masking()(L.Dense(4, "relu")(numbers)))
    pm = pipetrain.PipelineModel(
        keras.Model(numbers, L.Dense(3)(x)), scheme="1f1b", cuts=("recurrent",), **{"microbatches": 1, **settings}
    )
    pm.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match="masked"):
        pm.fit(networks.normal(4, 6, 2), np.zeros((4, 6)), batch_size=4, verbose=0)


def test_replicas_that_make_no_sense_are_refused():
    model = networks.mlp()
    with pytest.raises(ValueError, match="no stages to replicate"):
        pipetrain.PipelineModel(model, scheme="data-parallel", replicas=(2, 1))
    with pytest.raises(ValueError, match="one number from 1 up"):
        pipetrain.PipelineModel(model, stages=2, replicas=2, scheme="spectrain")
    profile = pipetrain.profile(model, 8, verbose=False, budget_s=None)
    with pytest.raises(ValueError, match="numbers from 1 up"):
        pipetrain.partition(profile, 4, replicas=(2, 0, 2))
    with pytest.raises(ValueError, match="given twice"):
        pipetrain.PipelineModel(
            model, pipetrain.partition(profile, 4, replicas=(2, 1, 1)), replicas=(1, 2, 1), scheme="spectrain"
        )
    with pytest.raises(ValueError, match="no such device"):
        pipetrain.profile(model, 8, device="CPU:99")


def test_tensors_without_the_batch_first_are_refused_between_replicas():
    """Four steps of four rows: cut into single steps, they once trained as if they were rows."""
    x = keras.Input((4, 3))
    y = L.Lambda(lambda x: tf.transpose(x, (1, 0, 2)), output_shape=None, name="steps_first")(L.Dense(3)(x))
    model = keras.Model(x, L.Lambda(lambda x: tf.reduce_mean(x, 0))(L.Dense(2, name="b")(y)))
    pm = pipetrain.PipelineModel(model, scheme="weight-stashing", cuts=("b",), replicas=(1, 4))
    pm.compile("sgd", "mse")
    with pytest.raises(ValueError, match="must have the batch first"):
        pm.fit(np.zeros((8, 4, 3)), np.zeros((8, 2)), batch_size=4, verbose=0)


def test_replicas_share_the_summing_out_by_size():
    assert shared_out([100, 1, 100, 1, 50], 2) == [[0, 4], [2, 1, 3]]


@pytest.mark.wide
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_send_what_the_rule_says(replicas):
    """Of float32: each variable's gradient to the replica that sums it, and the sum from it to every other one."""
    pm = networks.pipeline(networks.mlp(2, 7), cuts=("d0",), scheme="vanilla", replicas=(replicas, 1))
    networks.fit(pm, *networks.data(40))
    sizes = [4 * int(np.prod(each.shape)) for each in pm.layers[0].variables]
    owned = [sum(sizes[n] for n in mine) for mine in shared_out(sizes, replicas)]
    expected = {(n, reduction_bytes(sum(sizes), each, replicas)) for n, each in enumerate(owned)}
    assert {(each.from_replica, each.size_bytes) for each in pm.trace.transfers if each.op == "R"} == expected
    partition = pm.partition(20)
    simulated = simulate(partition, "vanilla", minibatches=2).transfers
    even = {each.size_bytes for each in simulated if each.op == "R"}
    assert even == {reduction_bytes(sum(sizes), Fraction(sum(sizes), replicas), replicas)}
    assert abs(sum(size for _, size in expected) - replicas * even.pop()) < replicas


@pytest.mark.wide
def test_replicas_on_one_device_take_their_own_rows():
    """TensorFlow lets two threads that slice at once have each other's bounds, if Python has them take turns often."""
    tensors, together = [tf.range(5) for _ in range(4)], threading.Barrier(2)

    def wrong(replica):
        part, count = rows_of(5, replica, 2), 0
        with tf.device("CPU:1"):
            for n in range(6000):
                if n % 4 == 0:
                    together.wait(60)
                count += take(tensors[n % 4], part, 5).shape[0] != len(part)
        return count

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with futures.ThreadPoolExecutor(2) as threads:
            assert [*threads.map(wrong, range(2))] == [0, 0]
    finally:
        sys.setswitchinterval(before_s)


@pytest.mark.wide
def test_rows_of_what_is_posted_are_taken_where_data_are_read(monkeypatch):
    """Not on the caller's default device, which is the first stage's where there are GPUs."""
    inside.by_threads(monkeypatch)
    taken, sliced = set(), channels._sliced

    def noted(tensor, start, stop):
        rows = sliced(tensor, start, stop)
        if threading.current_thread() is threading.main_thread():
            taken.add(rows.device.rsplit("/", 1)[-1])
        return rows

    monkeypatch.setattr(channels, "_sliced", noted)
    pm = networks.pipeline(scheme="1f1b", cuts=networks.cuts(6, 2), replicas=(2, 1), microbatches=2)
    with tf.device("CPU:3"):
        networks.fit(pm, *networks.data(40))
    assert taken == {"device:CPU:0"}
