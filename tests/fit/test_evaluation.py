"""evaluate and predict through the stages: what the wrapped model gives on one device, and nothing left behind."""

from __future__ import annotations

import threading
import warnings

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from graph_models import compiled, many_inputs_and_outputs, tokens_and_numbers

import pipetrain
from pipetrain.compute.functions.inference import Inference
from pipetrain.compute.graph.blocks import Chain

BATCH = 16
L = keras.layers


def both(model, pm, *data, batch_size=BATCH, **settings):
    """The wrapped model's results and the pipeline's, by name."""
    return [
        each.evaluate(*data, batch_size=batch_size, verbose=0, return_dict=True, **settings) for each in (model, pm)
    ]


def pair(model, loss="mse", metrics=(), **settings):
    """The model compiled for itself, and in a pipeline."""
    pm = networks.in_way(model, **settings)
    for each in (model, pm):
        each.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=list(metrics), weighted_metrics=[])
    return model, pm


def assert_same(expected, got):
    assert list(got) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


@pytest.fixture
def mlp():
    """The network of ``networks`` for itself and in four stages."""
    return pair(networks.mlp(), networks.crossentropy(), ["accuracy"], cuts=networks.cuts(6, 4))


def everything():
    """Statistics that are no longer those of the start, dropout, and penalties of weights and of activities."""
    keras.utils.set_random_seed(3)
    layers = [
        L.Dense(12, kernel_regularizer="l2", name="a"),
        L.BatchNormalization(name="norm"),
        L.Dropout(0.5, name="drop"),
        L.Dense(9, activation="tanh", activity_regularizer=keras.regularizers.L2(0.3), name="b"),
        L.Dense(networks.CLASSES, bias_regularizer="l1", activity_regularizer="l1", name="c"),
    ]
    model = keras.Sequential([keras.Input((networks.FEATURES,)), *layers])
    model.get_layer("norm").moving_mean.assign(np.linspace(-1, 1, 12))
    model.get_layer("norm").moving_variance.assign(np.linspace(0.5, 2, 12))
    return model


SETTINGS = {
    "single": {"scheme": "single"},
    "flushed": {"cuts": ("norm", "drop"), "scheme": "gpipe", "microbatches": 8},
    "replicas": {"cuts": ("a", "b"), "replicas": (2, 3, 2)},
    "data-parallel": {"scheme": "data-parallel", "devices": ("CPU:0", "CPU:1")},
}


@pytest.mark.wide
@pytest.mark.parametrize("name", parameters.by_default(SETTINGS, "replicas"))
def test_losses_penalties_and_metrics_are_the_wrapped_model_s(name):
    """41 rows: the last batch has one of 5, or 17 of 24; some replicas then have none."""
    metrics = ["accuracy", "sparse_categorical_crossentropy"]
    model, pm = pair(everything(), networks.crossentropy(), metrics, **SETTINGS[name])
    (x, y), state = networks.data(41), [weight.copy() for weight in model.get_weights()]
    for batch_size, sample_weight in ((5, np.linspace(0.1, 2, 41)), (24, None)):
        if name != "data-parallel":  # whose loss Keras averages in another way
            assert_same(*both(model, pm, x, y, batch_size=batch_size, sample_weight=sample_weight))
        expected, got = (each.predict(x, batch_size=batch_size, verbose=0) for each in (model, pm))
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    networks.assert_equal(model.get_weights(), state)


@pytest.mark.wide
def test_several_inputs_and_outputs_by_name():
    keras.utils.set_random_seed(0)
    model = many_inputs_and_outputs()
    names = [block.name for block in Chain(model).blocks]
    pm = pipetrain.PipelineModel(model, cuts=(names[0], names[4]), replicas=(2, 1, 2), scheme="spectrain")
    compiled(model)
    compiled(pm)
    x, y = tokens_and_numbers()
    assert_same(*both(model, pm, x, y))
    rows = len(y["kind"])
    weights = {"kind": np.linspace(0, 1, rows), "size": np.linspace(1, 3, rows)}
    assert_same(*both(model, pm, x, y, sample_weight=weights))
    expected, got = model.predict(x, verbose=0), pm.predict(x, verbose=0)
    assert sorted(got) == sorted(expected)
    for key, values in expected.items():
        np.testing.assert_allclose(got[key], values, rtol=1e-5, atol=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("loss", ["sum_over_batch_size", "mean_with_sample_weight", "function"])
def test_masked_outputs_and_reductions(loss):
    """Masks cross the cut and reach the loss and the metrics; no reduction is refused, for no loss is divided."""
    keras.utils.set_random_seed(1)
    words = keras.Input((6,), dtype="int32")
    x = L.LSTM(4, return_sequences=True, name="recurrent")(L.Embedding(9, 4, mask_zero=True, name="words")(words))
    losses = {"function": lambda y, p: tf.square(p[..., 0] - tf.cast(y, p.dtype))}
    loss = losses.get(loss) or networks.crossentropy(reduction=loss)
    model, pm = pair(keras.Model(words, L.Dense(3)(x)), loss, ["accuracy"], cuts=("words", "recurrent"))
    x = np.random.default_rng(0).integers(0, 9, (22, 6)) * (np.arange(6) < 4)
    assert_same(*both(model, pm, x, x % 3, batch_size=8))
    assert_same(*both(model, pm, x, x % 3, batch_size=8, sample_weight=np.linspace(0.5, 1.5, 132).reshape(22, 6)))


def test_predict_before_compile_and_a_short_last_batch():
    model = networks.mlp()
    pm = pipetrain.PipelineModel(model, cuts=networks.cuts(6, 3), scheme="spectrain")
    x, _ = networks.data(37)
    for rows in (37, 2, 1):
        np.testing.assert_array_equal(pm.predict(x[:rows], BATCH, 0), model.predict(x[:rows], BATCH, 0))
    np.testing.assert_array_equal(pm.predict_on_batch(x), model.predict_on_batch(x))
    with pytest.raises(ValueError, match="compile"):
        pm.evaluate(x, x)


@pytest.mark.parametrize("kind", ["dataset", "labelled", "generator", "tensor"])
def test_whatever_keras_predicts_from(kind, mlp):
    model, pm = mlp
    x, y = networks.data(40)
    data = {
        "dataset": lambda: tf.data.Dataset.from_tensor_slices(x).batch(BATCH),
        "labelled": lambda: tf.data.Dataset.from_tensor_slices((x, tf.ragged.range(y))).batch(BATCH),
        "generator": lambda: ((part,) for part in np.split(x, 4)),
        "tensor": lambda: tf.constant(x),
    }[kind]
    np.testing.assert_array_equal(pm.predict(data(), verbose=0), model.predict(data(), verbose=0))


@pytest.mark.wide
def test_a_cut_that_nothing_has_decided_is_not_decided_by_evaluating():
    x, y = networks.data(40)
    model, pm = pair(networks.mlp(3), networks.crossentropy(), stages=2)
    assert_same(*both(model, pm, x, y))
    stages = inside.evaluating_stages(pm)
    assert len(stages) == 2 and inside.layout(pm).ends is None
    pm.predict(x, verbose=0)
    assert inside.evaluating_stages(pm) is stages  # measured and traced once
    pm.fit(x, y, verbose=0)
    assert_same(*both(model, pm, x, y))
    assert inside.evaluator(pm)._layout.ends == inside.layout(pm).ends
    again = pipetrain.PipelineModel(model, stages=pm.partition(), scheme="spectrain")
    np.testing.assert_allclose(again.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def endless(read):
    def source():
        x, y = networks.data(BATCH)
        while True:
            read.append(1)
            yield x, y

    shapes = tf.TensorSpec([BATCH, networks.FEATURES]), tf.TensorSpec([BATCH], tf.int32)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # TensorFlow's own reading ahead
    return tf.data.Dataset.from_generator(source, output_signature=shapes).with_options(options)


@pytest.mark.wide
def test_nothing_is_read_beyond_the_steps(mlp):
    _, pm = mlp
    for call in (pm.evaluate, pm.predict):
        read = []
        call(endless(read), steps=7, verbose=0)
        assert len(read) == 7
    read, (x, y) = [], networks.data(40)
    pm.fit(x, y, batch_size=BATCH, epochs=3, validation_data=endless(read), validation_steps=4, verbose=0)
    assert len(read) == 12


@pytest.mark.wide
def test_validation_in_fit_is_of_the_epoch_s_weights():
    (x, y), (x_test, y_test) = networks.data(5 * BATCH), networks.data(37, seed=1)
    pm, plain, expected = networks.pipeline(), networks.mlp(seed=9), []
    plain.compile(loss=networks.crossentropy(), metrics=["accuracy"])

    def look(epoch, logs):
        plain.set_weights(pm.get_weights())
        expected.append(plain.evaluate(x_test, y_test, batch_size=BATCH, verbose=0))

    seen = keras.callbacks.LambdaCallback(on_epoch_end=look)
    data = {"validation_data": (x_test, y_test), "callbacks": [seen]}
    how = {"batch_size": BATCH, "epochs": 3, "shuffle": False, "verbose": 0}
    history = pm.fit(x, y, **how, **data).history
    np.testing.assert_allclose(np.transpose([history["val_loss"], history["val_accuracy"]]), expected, rtol=1e-5)
    without = networks.pipeline()
    without.fit(x, y, **how)
    networks.assert_equal(pm.get_weights(), without.get_weights())  # it changes nothing about the training


@pytest.mark.wide
def test_callbacks_see_every_step_and_may_evaluate_predict_and_stop(mlp):
    model, pm = mlp
    x, y = networks.data(6 * BATCH)
    seen, inner, outputs = {model: [], pm: []}, [], []
    for each in (model, pm):
        keep = keras.callbacks.LambdaCallback(on_test_batch_end=lambda batch, logs, to=seen[each]: to.append(logs))
        each.evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=[keep])
    for expected, got in zip(seen[model], seen[pm], strict=True):
        assert_same(dict(sorted(expected.items())), dict(sorted(got.items())))

    def predict_in_between(batch, logs):
        inner.append(pm.predict(x[: batch + 1], verbose=0))
        outputs.append(logs["outputs"])

    within = keras.callbacks.LambdaCallback(on_predict_batch_end=predict_in_between)
    np.testing.assert_array_equal(pm.predict(x, BATCH, 0, None, [within]), model.predict(x, BATCH, 0))
    assert [len(each) for each in inner] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(np.concatenate(outputs), model.predict(x, BATCH, 0))

    def stop(batch, logs):
        pm.stop_evaluating = batch == 1

    stopped = pm.evaluate(x, y, BATCH, 0, None, None, [keras.callbacks.LambdaCallback(on_test_batch_end=stop)])
    np.testing.assert_allclose(stopped, model.evaluate(x[: 2 * BATCH], y[: 2 * BATCH], BATCH, 0), rtol=1e-5)


def test_one_batch_at_a_time(mlp):
    model, pm = mlp
    x, y = networks.data(11)
    assert_same(*(each.test_on_batch(x, y, np.arange(11.0), return_dict=True) for each in mlp))
    np.testing.assert_allclose(pm.test_on_batch(x, y), model.test_on_batch(x, y), rtol=1e-5)
    np.testing.assert_array_equal(pm.predict_on_batch(x), model.predict_on_batch(x))


@pytest.mark.wide
def test_new_weights_count_and_old_ones_are_let_go(mlp):
    model, pm = mlp
    x, y = networks.data(40)
    both(model, pm, x, y)

    def forwards():
        return [replica._forward for stage in inside.evaluating_stages(pm) for replica in stage]

    traced = forwards()
    model.set_weights([weight * 1.5 for weight in model.get_weights()])
    assert_same(*both(model, pm, x, y))
    assert forwards() == traced
    pm.compile("sgd", networks.crossentropy(reduction="sum"), metrics=["sparse_categorical_accuracy"])
    model.compile("sgd", networks.crossentropy(reduction="sum"), metrics=["sparse_categorical_accuracy"])
    assert_same(*both(model, pm, x, y))
    assert forwards() != traced  # compiled again, as Keras' are: what is trainable may be other variables
    replicas = [replica for stage in inside.evaluating_stages(pm) for replica in stage]
    assert not any(replica.weights() for replica in replicas)


class Noise(L.Layer):
    """Draws in inference too, as the sampling layer of a variational autoencoder does."""

    def __init__(self):
        super().__init__(name="noise")
        self.seed = keras.random.SeedGenerator(7)

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seed)


@pytest.mark.wide
def test_seeds_move_on_as_in_plain_keras():
    results, x = [], np.zeros((24, 3), "float32")
    for make in (
        lambda model: model,
        lambda model: pipetrain.PipelineModel(model, cuts=("noise",), scheme="spectrain"),
    ):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), Noise(), L.Dense(2)])
        made = make(model)
        results.append(np.concatenate([made.predict(x, batch_size=8, verbose=0) for _ in range(2)]))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert len(np.unique(results[0])) == results[0].size


def test_a_batch_is_never_divided():
    """Scores of every row against every other: whoever cut the batch would give others."""
    x = keras.Input((4,))
    queries, keys = L.Dense(3, name="queries")(x), L.Dense(3, name="keys")(x)
    scores = L.Lambda(lambda both: tf.matmul(both[0], both[1], transpose_b=True), output_shape=(None,), name="scores")
    model = keras.Model(x, scores([queries, keys]))
    pm = pipetrain.PipelineModel(model, cuts=("queries", "keys"), scheme="spectrain")
    data = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    np.testing.assert_allclose(pm.predict(data, 32, 0), model.predict(data, 32, 0), rtol=1e-5, atol=1e-6)


def test_a_fixed_batch_and_half_precision():
    keras.utils.set_random_seed(0)
    layers = [L.Dense(6, dtype="mixed_bfloat16", name="a"), L.Dense(3, dtype="bfloat16", name="b")]
    model, pm = pair(keras.Sequential([keras.Input((4,), batch_size=8), *layers]), metrics=["mae"], cuts=("a",))
    x, y = np.random.default_rng(0).normal(size=(2, 24, 4)).astype("float32")
    assert_same(*both(model, pm, x, y[:, :3], batch_size=8))
    got, expected = pm.predict(x, 8, 0), model.predict(x, 8, 0)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


@pytest.mark.wide
@pytest.mark.parametrize(("stage", "replicas"), parameters.combinations([0, 2], [None, (2, 2, 2)]))
def test_an_exception_in_a_stage_names_it_and_leaves_no_thread(stage, replicas, monkeypatch):
    inside.forwards_by_threads(monkeypatch)
    x, y = networks.data(100)
    model, pm = pair(networks.mlp(), networks.crossentropy(), cuts=networks.cuts(6, 3), replicas=replicas)
    assert_same(*both(model, pm, x, y))
    broken, original = inside.evaluating_stages(pm)[stage][-1], Inference.forward
    for call in (lambda: pm.evaluate(x, y, verbose=0), lambda: pm.predict(x, verbose=0)):
        count = []

        def forward(self, *args, count=count):
            count.append(self)
            if self is broken and count.count(self) == 3:
                raise KeyError("boom")
            return original(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Inference, "forward", forward)
            with pytest.raises(KeyError, match="boom") as caught:
                call()
        which = ", replica 1" if replicas else ""
        assert f"stage {stage}{which}, forward of minibatch 2 (action {stage}F2)" in "\n".join(caught.value.__notes__)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipetrain")]
        assert not broken.weights()
    assert_same(*both(model, pm, x, y))


class Positive(L.Layer):
    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_greater(x[:, 0], -50.0, message="too cold")]):
            return tf.identity(x)


@pytest.mark.parametrize("at", ["first", pytest.param("second", marks=pytest.mark.wide)])
def test_an_operation_that_fails_is_named_with_its_minibatch(at):
    layers = {name: [Positive()] if name == at else [] for name in ("first", "second")}
    parts = [*layers["first"], L.Dense(3, kernel_initializer="identity", name="a"), *layers["second"], L.Dense(2)]
    pm = pipetrain.PipelineModel(keras.Sequential([keras.Input((3,)), *parts]), cuts=("a",), scheme="spectrain")
    x = np.zeros((40, 3), "float32")
    want = pm.predict(x, batch_size=8, verbose=0)
    x[21] = -100.0
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="too cold") as caught:
            pm.predict(x, batch_size=8, verbose=0)
        stage = ("first", "second").index(at)
        assert f"stage {stage}, forward of minibatch 2 (action {stage}F2)" in "\n".join(caught.value.__notes__)
    np.testing.assert_array_equal(pm.predict(0 * x, batch_size=8, verbose=0), want)


def test_weights_are_read_where_they_are(mlp):
    """What is assigned between two evaluations counts, and nothing holds a copy."""
    model, pm = mlp
    x, _ = networks.data(24)
    for _ in range(2):
        np.testing.assert_allclose(pm.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5)
        replicas = [replica for stage in inside.evaluating_stages(pm) for replica in stage]
        assert not any(replica.weights() for replica in replicas)
        model.layers[-1].bias.assign_add(np.arange(networks.CLASSES, dtype="float32"))


@pytest.mark.wide
def test_an_interrupt_ends_the_threads(mlp):
    model, pm = mlp
    x, y = networks.data(100)

    def interrupt(batch, logs):
        if batch == 2:
            raise KeyboardInterrupt

    stop = keras.callbacks.LambdaCallback(on_test_batch_end=interrupt, on_predict_batch_end=interrupt)
    with pytest.raises(KeyboardInterrupt):
        pm.evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=[stop])
    with pytest.raises(KeyboardInterrupt):
        pm.predict(x, batch_size=BATCH, verbose=0, callbacks=[stop])
    with pytest.raises(KeyboardInterrupt):
        pm.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[stop], validation_data=(x, y))
    assert_same(*both(model, pm, x, y))


@pytest.mark.parametrize("replicas", [None, pytest.param((2, 1, 2), marks=pytest.mark.wide)])
def test_a_batch_without_rows(replicas):
    """It has no microbatch to wait for: once the end of everything."""
    model, pm = pair(networks.mlp(), networks.crossentropy(), cuts=networks.cuts(6, 3), replicas=replicas)
    x, y = networks.data(20)
    filtered = (
        tf.data.Dataset.from_tensor_slices((x, y)).batch(4).map(lambda x, y: (x[x[:, 0] > 0.9], y[x[:, 0] > 0.9]))
    )
    assert 0 in [len(labels) for _, labels in filtered]
    np.testing.assert_allclose(
        pm.predict(filtered, verbose=0), model.predict(filtered, verbose=0), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(pm.evaluate(filtered, verbose=0), model.evaluate(filtered, verbose=0), rtol=1e-5)


def test_a_broken_or_short_source_is_heard(mlp):
    _, pm = mlp
    x, _ = networks.data(64)

    def source():
        yield from ((part,) for part in np.split(x, 4))
        raise RuntimeError("the disk is gone")

    with pytest.raises(Exception, match="the disk is gone"):
        pm.predict(source(), steps=8, verbose=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(pm.predict(tf.data.Dataset.from_tensor_slices(x).batch(BATCH), steps=6, verbose=0)) == 64
    assert any("ran out of data" in str(warning.message) for warning in caught)


def test_evaluating_within_predict():
    pm = networks.pipeline()
    x, y = networks.data(32)
    look = keras.callbacks.LambdaCallback(on_predict_batch_end=lambda step, logs: pm.evaluate(x, y, verbose=0))
    np.testing.assert_allclose(pm.predict(x, verbose=0, callbacks=[look]), pm.model.predict(x, verbose=0), rtol=1e-5)


def test_where_the_weights_are_elsewhere_they_are_on_the_devices_while_an_evaluation_runs(monkeypatch):
    """As on workers: copied once for all minibatches, new ones in the next evaluation, and let go at the end."""
    monkeypatch.setattr("pipetrain.compute.functions.inference.is_prompt", lambda device: False)
    model = networks.mlp(4)
    model.get_layer("d1").trainable = False
    pm = networks.pipeline(model, cuts=networks.cuts(4, 2), scheme="1f1b")
    plain = keras.models.clone_model(model)
    plain.compile(loss=networks.crossentropy(), metrics=["accuracy"])
    x, y = networks.data(50)
    for seed in range(2):
        weights = [np.random.default_rng(seed).normal(size=each.shape) for each in model.get_weights()]
        pm.set_weights(weights)
        plain.set_weights(weights)
        given = {"batch_size": 8, "verbose": 0}
        np.testing.assert_allclose(pm.evaluate(x, y, **given), plain.evaluate(x, y, **given), rtol=1e-5)
        np.testing.assert_allclose(pm.predict(x, **given), plain.predict(x, **given), atol=1e-5)
    every = [each for replicas in inside.evaluating_stages(pm) for each in replicas]
    held = [variable for each in every for those in (each._held, each._state._held) for variable in those.variables]
    assert len(held) == len(model.weights) and not any(int(tf.size(variable.read_value())) for variable in held)
