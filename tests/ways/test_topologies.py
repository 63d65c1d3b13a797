"""Who sends to whom in an all-reduce: sums that are made on a ring, and workers that average with their neighbours."""

from __future__ import annotations

import inside
import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from checkpointed import STEPS, assert_goes_on_bitwise
from checkpointed import run as checkpointed
from transfer_models import words

import pipetrain
from pipetrain.compute.transfers.message import Order, mixed, reduced
from pipetrain.schemes.synchrony import Gossip, topology_of
from pipetrain.schemes.transfers.plan import Pack, Phase

DATA = networks.data(70)
PATH = Gossip(graph=((1,), (0, 2), (1,)))


def devices(count):
    return tuple(f"CPU:{n}" for n in range(count))


def trained(topology=None, workers=3, data=DATA, make=networks.small, optimizer=None, rows=20, **settings):
    """Two epochs, whose last minibatch is short."""
    keras.utils.set_random_seed(0)
    settings = {"devices": devices(workers), "stages": None, "order": "none", "topology": topology, **settings}
    pm = networks.pipeline(make(), optimizer, scheme="all-reduce", **settings)
    networks.fit(pm, *data, epochs=2, batch_size=rows)
    return pm


def trained_weights(pm):
    return [each.numpy() for each in pm.model.trainable_variables]


def metropolis(neighbours):
    """A matrix by its definition."""
    count = len(neighbours)
    found = np.zeros((count, count))
    for i, others in enumerate(neighbours):
        for j in others:
            found[i, j] = 1 / (1 + max(len(others), len(neighbours[j])))
        found[i, i] = 1 - found[i].sum()
    return found


RING_OF_5 = ((1, 4), (0, 2), (1, 3), (2, 4), (0, 3))
TORUS_OF_6 = ((1, 2, 3), (0, 2, 4), (0, 1, 5), (0, 4, 5), (1, 3, 5), (2, 3, 4))  # two rows of three


@pytest.mark.parametrize(
    ("topology", "neighbours", "every"),
    [
        ("gossip", RING_OF_5, 1),
        ("gossip:torus", TORUS_OF_6, 1),
        (PATH, PATH.graph, 1),
        ("gossip:complete", ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)), 1),
        ("gossip:ring", RING_OF_5, 2),
    ],
)
def test_weights_are_those_of_a_straight_line_of_numpy(topology, neighbours, every):
    """A layer without a bias, the mean squared error, SGD: each worker's step, then the average, six in an epoch."""
    workers, rng, rate = len(neighbours), np.random.default_rng(0), 0.1
    assert topology_of(topology).neighbours(workers) == neighbours
    rows = 2 * workers
    x, y = rng.normal(size=(6 * rows, 8)).astype("float32"), rng.normal(size=(6 * rows, 4)).astype("float32")
    layer = keras.layers.Dense(4, use_bias=False)
    model = keras.Sequential([keras.Input((8,)), layer])
    own = np.stack([layer.get_weights()[0].astype(np.float64)] * workers)
    synchrony = f"local:{every}" if every > 1 else None
    way = pipetrain.AllReduce(order="none", topology=topology, synchrony=synchrony)
    pm = pipetrain.PipelineModel(model, scheme=way, devices=devices(workers))
    pm.compile(keras.optimizers.SGD(rate), "mse")
    pm.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    for step, first in enumerate([*range(0, 6 * rows, rows)] * 2):
        for worker in range(workers):
            mine = slice(first + 2 * worker, first + 2 * worker + 2)
            own[worker] -= rate * x[mine].T @ (x[mine] @ own[worker] - y[mine]) * 2 / (2 * 4)
        if (step + 1) % every == 0:
            own = np.einsum("ij,jkl->ikl", metropolis(neighbours), own)
    np.testing.assert_allclose(layer.get_weights()[0], own.mean(0), rtol=1e-4, atol=1e-6)


def test_exchanges_come_after_as_many_updates_whatever_drains_there_are():
    """Epochs of four minibatches, and neighbours that average at every third update."""
    found = []
    for epochs, per in ((1, 24), (6, 4)):
        keras.utils.set_random_seed(0)
        way = {"scheme": "all-reduce", "devices": devices(3), "order": "none"}
        pm = networks.in_way(networks.small(), topology="gossip", synchrony="local:3", **way)
        pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
        x, y = (np.tile(each[:24], (1 if per == 4 else 6, *[1] * (each.ndim - 1))) for each in DATA)
        pm.fit(x, y, batch_size=6, epochs=epochs, shuffle=False, verbose=0)
        found.append(trained_weights(pm))
    networks.assert_equal(*found)


def test_a_complete_graph_gives_the_average():
    """After every step all workers have the same weights, bitwise; with SGD and equal parts it is an all-reduce."""
    equal = {"data": networks.data(60), "rows": 15}
    pm = trained("gossip:complete", optimizer=keras.optimizers.SGD(0.05), **equal)
    first, *others = ([each.numpy() for each in w.variables] for w in inside.strategy(pm)._weights)
    for other in others:
        networks.assert_equal(other, first)
    networks.assert_close(pm.get_weights(), trained(optimizer=keras.optimizers.SGD(0.05), **equal).get_weights())


@pytest.mark.wide
def test_weights_do_not_depend_on_the_order():
    for topology in ("gossip", "ring"):
        whole = trained(topology, order="none")
        networks.assert_equal(trained(topology, order="caramel").get_weights(), whole.get_weights())


@pytest.mark.wide
def test_a_ring_comes_to_the_weights_of_an_all_reduce():
    networks.assert_close(trained("ring", 4).get_weights(), trained(None, 4).get_weights())
    networks.assert_equal(trained("ring", 2).get_weights(), trained(None, 2).get_weights())
    data = np.arange(60 * 6).reshape(60, 6) % 20, np.arange(60) % 5
    for_words = {"data": data, "make": words, "rows": 16}
    networks.assert_close(trained("ring", **for_words).get_weights(), trained(None, **for_words).get_weights())
    local = {"synchrony": "local:2", "workers": 4}
    networks.assert_close(trained("ring", **local).get_weights(), trained(None, **local).get_weights())


def on_devices(values):
    return [(f"CPU:{n}", {k: tf.constant(each) for k, each in enumerate(mine)}) for n, mine in enumerate(values)]


def like(values):
    return {k: tf.TensorSpec(each.shape, each.dtype) for k, each in enumerate(values[0])}


PHASES = {
    "one by one": Phase(tuple(Pack((n,), 4) for n in range(3))),
    "together": Phase((Pack((2, 0), 8), Pack((1,), 4))),
    "in chunks": Phase((Pack((0,), 4, 1, 3), Pack((0,), 4, 0, 3), Pack((0,), 4, 2, 3), Pack((1, 2), 8))),
}


@pytest.mark.parametrize("present", [(0, 1, 2, 3), (1, 3)])
@pytest.mark.parametrize("phase", PHASES)
def test_sums_on_a_ring_are_bitwise_numpys_in_the_same_order(phase, present):
    """Part k of a variable is summed from device k on, whatever travels together; some devices may have nothing."""
    rng = np.random.default_rng(0)
    values = [[rng.normal(size=size).astype("float32") for size in ((7, 3), (2,), (4, 5))] for _ in range(4)]
    sinks = [f"CPU:{n}" for n in range(4)]

    @tf.function(autograph=False)
    def sums():
        made = [each for n, each in enumerate(on_devices(values)) if n in present]
        return reduced(Order(PHASES[phase], "push"), made, sinks, like(values), is_ring=True)

    found = sums()
    for k, shape in enumerate(each.shape for each in values[0]):
        flat = [each[k].ravel() for each in values]
        expected = np.zeros_like(flat[0])
        for part in range(4):
            rows = slice(len(expected) * part // 4, len(expected) * (part + 1) // 4)
            order = [(part + hop) % 4 for hop in range(4) if (part + hop) % 4 in present]
            total = flat[order[0]][rows]
            for each in order[1:]:
                total = total + flat[each][rows]
            expected[rows] = total
        for mine in found:
            np.testing.assert_array_equal(mine[k].numpy(), expected.reshape(shape))


@pytest.mark.parametrize("phase", PHASES)
def test_averages_with_neighbours_are_bitwise_numpys(phase):
    rng = np.random.default_rng(0)
    values = [[rng.normal(size=size).astype("float32") for size in ((7, 3), (2,), (4, 5))] for _ in range(4)]
    factors = Gossip(((1, 2, 3), (0,), (0, 3), (0, 2))).mixing(4)

    @tf.function(autograph=False)
    def averages():
        return mixed(Order(PHASES[phase], "push"), on_devices(values), like(values), factors)

    for mine, row in zip(averages(), factors, strict=True):
        for k in range(3):
            terms = [values[other][k] for other in row]
            if len({*row.values()}) == 1:
                expected = sum(terms[1:], terms[0]) * np.float32(next(iter(row.values())))
            else:
                scaled = [each * np.float32(factor) for each, factor in zip(terms, row.values(), strict=True)]
                expected = sum(scaled[1:], scaled[0])
            np.testing.assert_array_equal(mine[k].numpy(), expected)


@pytest.mark.parametrize("graph", ["ring", "torus", "complete"])
@pytest.mark.parametrize("workers", range(1, 13))
def test_what_workers_give_and_take_is_whole(graph, workers):
    rows = Gossip(graph).mixing(workers)
    matrix = np.zeros((workers, workers))
    for worker, row in enumerate(rows):
        for other, factor in row.items():
            matrix[worker, other] = factor
    np.testing.assert_allclose(matrix, metropolis(Gossip(graph).neighbours(workers)), atol=1e-15)
    np.testing.assert_allclose(matrix.sum(0), 1)
    np.testing.assert_array_equal(matrix, matrix.T)
    assert np.sort(np.abs(np.linalg.eigvalsh(matrix)))[-2:][0] < 1 or workers == 1  # all come to one average


@pytest.mark.parametrize("synchrony", [None, pytest.param("local:2", marks=pytest.mark.wide)])
@pytest.mark.wide
def test_a_run_that_is_stopped_goes_on_bitwise(synchrony, tmp_path):
    way = {"scheme": "all-reduce", "devices": devices(4), "stages": None, "order": "none", "topology": "gossip"}
    assert_goes_on_bitwise(tmp_path, synchrony=synchrony, **way)


@pytest.mark.wide
@pytest.mark.parametrize(
    "make", [lambda: keras.optimizers.SGD(0.05, momentum=0.9), lambda: keras.optimizers.Adam(0.01)]
)
def test_checkpoints_change_nothing(make, tmp_path):
    """Each worker's weights, and what its optimizer has gathered, go through drains, and through a resume."""
    way = {"scheme": "all-reduce", "devices": devices(4), "stages": None, "order": "none", "topology": "gossip"}
    whole, _ = checkpointed(tmp_path / "whole", optimizer=make(), every_steps=None, **way)
    often, _ = checkpointed(tmp_path / "often", optimizer=make(), every_steps=1, **way)
    _, history = checkpointed(tmp_path / "stopped", stop_after=STEPS + 3, optimizer=make(), every_steps=3, **way)
    assert history is None
    again, _ = checkpointed(tmp_path / "stopped", optimizer=make(), every_steps=3, **way)
    for pm in (often, again):
        networks.assert_equal(trained_weights(pm), trained_weights(whole))


def test_a_look_at_weights_changes_nothing():
    found = []
    for looks in ([], [pipetrain.callbacks.Snapshots(1, lambda *given: None)]):
        keras.utils.set_random_seed(0)
        pm = networks.in_way(networks.small(), scheme="all-reduce", devices=devices(4), order="none", topology="gossip")
        pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
        pm.fit(*DATA, batch_size=20, epochs=2, shuffle=False, verbose=0, callbacks=looks)
        found.append(pm.get_weights())
    networks.assert_equal(*found)


def test_other_weights_are_every_workers():
    """What a user sets, and what other workers have left in a checkpoint, all go on from."""
    pm = trained("gossip", 4, optimizer=keras.optimizers.SGD(0.05))
    pm.set_weights([each * 0 for each in pm.get_weights()])
    pm.optimizer.learning_rate = 0.0
    networks.fit(pm, *DATA, epochs=1, batch_size=20)
    assert all(not each.numpy().any() for w in inside.strategy(pm)._weights for each in w.variables)


def test_a_run_goes_on_with_fewer_workers(tmp_path):
    way = {"scheme": "all-reduce", "stages": None, "order": "none", "topology": "gossip"}
    checkpointed(tmp_path, stop_after=STEPS + 3, devices=devices(4), **way)
    pm, history = checkpointed(tmp_path, devices=devices(3), **way)
    assert np.isfinite(history["loss"]).all() and all(np.isfinite(each).all() for each in pm.get_weights())


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Only all-reduce"):
        networks.in_way(networks.small(), scheme="parameter-server", topology="gossip")
    for wrong in ("star", "gossip:star", "ring:2"):
        with pytest.raises(ValueError, match="Unknown"):
            pipetrain.AllReduce(topology=wrong)
    with pytest.raises(TypeError, match="topology=3"):
        pipetrain.AllReduce(topology=3)
    for topology in ("ring", "gossip"):
        with pytest.raises(ValueError, match=r"topology=.*compression='int8'"):
            pipetrain.AllReduce(topology=topology, compression="int8")
    with pytest.raises(ValueError, match=r"outer step.*Try synchrony='local:8'"):
        pipetrain.AllReduce(topology="gossip", synchrony=pipetrain.LocalSGD(8, 0.7, 0.9))
    for options in ({"fragments": 2}, {"overlap": True}):
        with pytest.raises(ValueError, match=r"topology='gossip'.*fragments=.*Try fragments=1 and overlap=False"):
            pipetrain.AllReduce(topology="gossip", synchrony=pipetrain.LocalSGD(8, **options))
    for graph, problem in (
        (((1,), ()), "know each other"),
        (((0,),), "know each other"),
        (((1,), (0,), (3,), (2,)), "All workers are joined"),
        (((4,),), "numbers of workers"),
        ((), "numbers of workers"),
    ):
        with pytest.raises(ValueError, match=problem):
            Gossip(graph)
    with pytest.raises(TypeError, match="graph=3"):
        Gossip(3)
    with pytest.raises(ValueError, match="of 3, for 4 workers"):
        trained(PATH, 4)
    with pytest.raises(ValueError, match=r"use_ema=True\. Try use_ema=False"):
        trained("gossip", optimizer=keras.optimizers.SGD(0.05, use_ema=True))
