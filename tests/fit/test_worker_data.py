"""``pipetrain.data``: every worker reads its rows from a dataset of its own, here on logical devices."""

from __future__ import annotations

import checkpointed
import keras
import networks
import numpy as np
import pytest
import tensorflow as tf

import pipetrain
from pipetrain.frontend import worker_data

ROWS = 6  # of each worker in a minibatch
STEPS = 5
SCHEMES = ("all-reduce", "parameter-server")
FEATURES, CLASSES = networks.FEATURES, networks.CLASSES


def wide(*case):
    """A case that is not among the default ones."""
    return pytest.param(*case, marks=pytest.mark.wide)


def numbers(worker, workers):
    """Numbers of rows, those of each worker in an order of its own that is another one in every epoch."""
    mine = tf.data.Dataset.range(STEPS * ROWS * workers).shard(workers, worker)
    return mine.shuffle(2 * ROWS, seed=worker).batch(ROWS)


def row(n):
    """Inputs and labels made of row numbers."""
    angles = tf.cast(n[:, None], tf.float32) * tf.range(1.0, FEATURES + 1.0)
    return tf.sin(angles), tf.cast(n % CLASSES, tf.int32)


def read(worker, workers):
    return numbers(worker, workers).map(row)


def weighted(worker, workers):
    return numbers(worker, workers).map(lambda n: (*row(n), 1.0 / tf.cast(1 + n % 3, tf.float32)))


def whole(fn, workers):
    """The same minibatches as one usual data set."""
    parts = tf.data.Dataset.zip(tuple(fn(worker, workers) for worker in range(workers)))
    return parts.map(lambda *each: tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *each))


def model(scheme="all-reduce", workers=2, loss=None, metrics=("accuracy",), **settings):
    pm = networks.in_way(networks.mlp(4), workers, scheme, **settings)
    loss = loss or networks.crossentropy()
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, weighted_metrics=[*metrics] or None)
    return pm


def fit(pm, x, **settings):
    return pm.fit(x, **{"epochs": 2, "shuffle": False, "verbose": 0, **settings})


def both(fn, scheme="all-reduce", workers=2, make=model, **settings):
    """History and weights by data that workers read, and by the same rows in one data set."""
    found = []
    for x in (pipetrain.data(fn), whole(fn, workers)):
        pm = make(scheme, workers)
        history = fit(pm, x, **settings).history
        found.append((networks.without_figures(history), pm.get_weights()))
    return found


def assert_bitwise(found):
    (history, weights), (of_whole, wanted) = found
    assert history == of_whole
    networks.assert_equal(weights, wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("workers", [2, wide(3)])
def test_training_is_bitwise_that_on_the_same_rows_in_one_data_set(scheme, workers):
    assert_bitwise(both(read, scheme, workers))


PIPELINES = {
    "1f1b": {"microbatches": 2},
    "gpipe": {"microbatches": 2, "replicas": (2, 1)},
    "spectrain": {},
    "single": {"cuts": None},
}


@pytest.mark.parametrize("scheme", ["1f1b", *map(wide, ["gpipe", "spectrain", "single"])])
def test_the_first_stage_s_device_reads_for_a_pipeline(scheme):
    def make(scheme, workers):
        return model(scheme, None, **{"cuts": ["d1"], **PIPELINES[scheme]})

    assert_bitwise(both(weighted, scheme, 1, make))


@pytest.mark.parametrize(
    ("fn", "settings"),
    [
        wide(weighted, {}),
        wide(read, {"class_weight": {0: 2.0, 1: 0.5, 2: 1.0, 3: 1.0, 4: 3.0}}),
        (lambda *of: read(*of).repeat(), {"steps_per_epoch": 3, "epochs": 3}),
        wide(lambda *of: read(*of).filter(lambda *_: True), {}),
    ],
    ids=["sample_weight", "class_weight", "steps_per_epoch", "unknown length"],
)
def test_weights_and_steps_are_as_those_of_one_data_set(fn, settings):
    assert_bitwise(both(fn, **settings))


def test_without_metrics_no_labels_are_fetched(monkeypatch):
    fetched = []
    monkeypatch.setattr(
        "pipetrain.run.worker_rows.RowsOnWorkers.on", lambda self, device: fetched.append(1) or tf.concat(self.parts, 0)
    )
    found = both(read, make=lambda *of: model(*of, metrics=()))
    assert_bitwise(found)
    assert len(fetched) == 2  # of each epoch's first minibatch, to see what kind of loss it is


@pytest.mark.wide
def test_the_loss_is_divided_by_what_all_workers_have():
    """A mean over the labels that are not ignored, of which workers have different numbers."""
    found = both(weighted, make=lambda *of: model(*of, loss=networks.crossentropy(ignore_class=1)))
    (history, weights), (of_whole, wanted) = found
    np.testing.assert_allclose(history["loss"], of_whole["loss"], rtol=1e-5)
    networks.assert_close(weights, wanted)


def test_workers_may_have_different_numbers_of_rows():
    def uneven(worker, workers):
        return read(worker, workers).map(lambda x, y: (x[: ROWS - 4 * worker], y[: ROWS - 4 * worker]))

    (history, weights), (of_whole, wanted) = both(uneven)
    np.testing.assert_allclose(history["loss"], of_whole["loss"], rtol=1e-5)
    networks.assert_close(weights, wanted)


@pytest.mark.wide
@pytest.mark.parametrize(("scheme", "stop_after"), [("all-reduce", 3), ("all-reduce", 7), ("1f1b", 7)])
def test_stopped_and_resumed_is_bitwise_as_never_stopped(scheme, stop_after, tmp_path):
    """In the middle of an epoch, whose rows are in another order than those of the epoch before."""
    settings = {"data": lambda: {"x": pipetrain.data(read), "shuffle": False}}
    settings |= {"scheme": scheme, "stages": 2, "every_steps": 2}
    wanted, history = checkpointed.run(tmp_path / "whole", **settings)
    assert checkpointed.run(tmp_path / "it", stop_after, **settings)[1] is None
    pm, resumed = checkpointed.run(tmp_path / "it", **settings)
    networks.assert_equal(pm.get_weights(), wanted.get_weights())
    assert resumed["loss"] == history["loss"][-len(resumed["loss"]) :]


def test_datasets_of_different_lengths_are_refused_before_training():
    pm = model()
    before = pm.get_weights()
    with pytest.raises(ValueError, match=r"5 of worker 0 \(.*CPU:0\), 4 of worker 1 .*Try take\(4\)"):
        fit(pm, pipetrain.data(lambda *of: read(*of).take(5 - of[0])))
    networks.assert_equal(pm.get_weights(), before)
    with pytest.raises(ValueError, match=r"endless of worker 0 .*, 5 of worker 1"):
        fit(pm, pipetrain.data(lambda *of: read(*of).repeat(None if of[0] == 0 else 1)), steps_per_epoch=2)


def test_a_dataset_that_ends_early_is_named():
    def short(worker, workers):
        return read(worker, workers).take(STEPS - 2 * worker).filter(lambda *_: True)

    pm = model()
    with pytest.raises(ValueError, match=r"3 elements of worker 1 .*, and more of worker 0 "):
        fit(pm, pipetrain.data(short))
    fit(pm, pipetrain.data(read))


def test_an_error_in_reading_names_the_worker():
    def broken(worker, workers):
        check = tf.debugging.assert_less
        return numbers(worker, workers).map(lambda n: (check(n * worker, np.int64(20)), row(n))[1])

    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        fit(model(), pipetrain.data(broken))
    assert "Raised in reading the data of worker 1" in "".join(raised.value.__notes__)


@pytest.mark.parametrize(
    ("fn", "settings", "wrong"),
    [
        (read, {"y": np.zeros(3)}, r"Received: x=pipetrain.data\(...\) and y=\.\.\.\. Try leaving it out"),
        (
            read,
            {"batch_size": 3, "sample_weight": np.ones(3)},
            "sample_weight=... and batch_size=.... Try leaving them",
        ),
        (read, {"validation_split": 0.5}, "validation_split=..."),
        (read, {"validation_data": pipetrain.data(read)}, r"validation_data=pipetrain.data\(...\). Try a tf.data"),
        (lambda *of: read(*of).repeat(), {}, "steps_per_epoch=None. Try steps_per_epoch"),
        (
            lambda *of: read(*of).unbatch().map(lambda x, y: (x, y)),
            {},
            r"elements of .* of worker 0. Try batch\(rows\)",
        ),
        (
            lambda worker, _: tf.data.Dataset.range(9).batch(2 + worker).map(lambda n: (row(n), n)[worker]),
            {},
            "one kind",
        ),
        (lambda *of: read(*of).map(lambda x, y: (x[:, 1:], y)), {}, "do not fit the model"),
        (lambda *of: read(*of).map(lambda x, y: (x, tf.RaggedTensor.from_tensor(y[:, None]))), {}, "must be dense"),
        (lambda *of: [], {}, r"fn\(0, 2\) of pipetrain.data returned list"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(fn, settings, wrong):
    with pytest.raises((ValueError, TypeError), match=wrong):
        fit(model(), pipetrain.data(fn), **settings)


def test_a_function_is_wanted():
    with pytest.raises(TypeError, match=r"Received: fn=3\. Try "):
        pipetrain.data(3)


@pytest.mark.parametrize("scheme", ["data-parallel", "grid", "coded-reduce", "auto"])
def test_schemes_that_read_in_this_process_say_so(scheme):
    own = {"children": 1, "stragglers": 0} if scheme == "coded-reduce" else {}
    pm = networks.in_way(networks.mlp(4), scheme=scheme, devices=("CPU:0", "CPU:1"), **own)
    pm.compile("sgd", networks.crossentropy())
    with pytest.raises(ValueError, match=f"scheme='{scheme}'. Try scheme='all-reduce'"):
        fit(pm, pipetrain.data(read))


@pytest.mark.parametrize("method", ["evaluate", "predict", "train_on_batch"])
def test_other_methods_read_in_this_process(method):
    with pytest.raises(ValueError, match=rf"Received: {method}\(pipetrain.data\(...\)\). Try "):
        getattr(model(), method)(pipetrain.data(read))


TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.range(3), tf.range(3)), 0)
ZEROS = tf.zeros([99, 99])


@pytest.mark.parametrize(
    ("fn", "wrong"),
    [
        (
            lambda *_: tf.data.Dataset.from_tensor_slices(np.random.random((900, 12))).batch(9),
            "[0-9]{5} bytes of const",
        ),
        (
            lambda *_: tf.data.Dataset.from_tensors(1).map(lambda _: tf.constant(np.random.random((900, 9)))),
            "bytes of c",
        ),
        (lambda *_: tf.data.Dataset.from_tensors([1]).map(lambda n: ZEROS + 1.0), "bytes of const"),
        (lambda *_: tf.data.Dataset.from_generator(tuple, output_signature=tf.TensorSpec([None])), "Python functions"),
        (
            lambda *_: tf.data.Dataset.from_tensors([1]).map(
                lambda n: tf.ensure_shape(tf.numpy_function(lambda k: k, [n], tf.int32), [1])
            ),
            "Python functions",
        ),
        (
            lambda *_: tf.data.Dataset.from_tensors([1]).map(TABLE.lookup),
            "Tables and variables",
        ),
    ],
)
def test_what_only_this_process_has_does_not_go_to_workers(fn, wrong, monkeypatch):
    monkeypatch.setattr(worker_data, "is_remote", lambda device: True)
    with pytest.raises(ValueError, match=f"{wrong}.*worker 0|{wrong}"):
        fit(model(), pipetrain.data(fn))
