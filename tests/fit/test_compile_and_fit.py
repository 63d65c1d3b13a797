"""Every option of compile and fit, and what else a Keras model has, in a pipeline as in plain Keras."""

from __future__ import annotations

import re

import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from networks import assert_alike, assert_equal, compiled, fit, fresh

import pipetrain

L = keras.layers
X, Y = networks.data(70)  # three minibatches of 20, one of 10
WEIGHTS = np.linspace(0.1, 2, len(X)).astype("float32")
SGD = keras.optimizers.SGD


def train(model, **settings):
    return fit(model, X, Y, **settings)


FIT = {
    "validation_data": {"validation_data": (X[:30], Y[:30]), "validation_batch_size": 15},
    "validation weights": {"validation_data": (X, Y, WEIGHTS)},
    "validation_split": {"validation_split": 0.3},
    "validation_freq": {"validation_data": (X, Y), "validation_freq": 2, "epochs": 3},
    "validation_steps": {"validation_data": (X, Y), "validation_steps": 2},
    "class_weight": {"class_weight": {0: 2.0, 1: 0.5, 2: 1.0, 3: 0.0, 4: 3.0}},
    "sample_weight": {"sample_weight": WEIGHTS},
    "steps_per_epoch": {"steps_per_epoch": 2, "epochs": 2},
    "initial_epoch": {"initial_epoch": 2, "epochs": 4},
    "batch_size": {"batch_size": None},
}


@pytest.mark.wide
@pytest.mark.parametrize("option", FIT)
def test_options_of_fit(option):
    _, history = assert_alike(lambda model: train(model, **FIT[option]))
    assert ("val_loss" in history) == option.startswith("validation")
    other = networks.without_figures(train(fresh("spectrain"), **FIT[option]).history)
    assert {name: len(values) for name, values in other.items()} == {name: len(history[name]) for name in history}
    assert np.isfinite(other["loss"]).all()


def test_a_seed_shuffles_as_in_keras():
    def shuffled(model):
        keras.utils.set_random_seed(4)
        return train(model, shuffle=True, epochs=2)

    _, history = assert_alike(shuffled)
    assert history["loss"] != pytest.approx(train(fresh("1f1b"), epochs=2).history["loss"], rel=1e-4)


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_verbosity(verbose, capsys):
    printed = []
    for scheme in ("keras", "1f1b", "spectrain"):
        train(fresh(scheme), verbose=verbose)
        printed.append(set(re.findall("4/4|loss|accuracy", capsys.readouterr().out)))
    assert len(printed[0]) == (3 if verbose else 0)
    assert printed[1] == printed[2] == printed[0]


class Batches(keras.utils.PyDataset):
    """The rows in their order, from one row later after every epoch."""

    def __init__(self):
        super().__init__()
        self.epochs = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        first = self.epochs + 20 * index
        return X[first : first + 20], Y[first : first + 20]

    def on_epoch_end(self):
        self.epochs += 1


def generator():
    while True:
        for first in range(0, 60, 20):
            yield X[first : first + 20], Y[first : first + 20], WEIGHTS[first : first + 20]


SOURCES = {
    "numpy": lambda: {"x": X, "y": Y},
    "tf.data": lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(20)},
    "tf.data with weights": lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).batch(20)},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 3},
    "PyDataset": lambda: {"x": Batches()},
}


def trained_on(source, model):
    data = SOURCES[source]()
    batch_size = 20 if "y" in data else None
    history = model.fit(**data, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history
    return history, getattr(data["x"], "epochs", 0)


@pytest.mark.wide
@pytest.mark.parametrize("source", SOURCES)
def test_sources_of_data(source):
    assert_alike(lambda model: trained_on(source, model))
    history, _ = trained_on(source, fresh("spectrain"))
    assert len(history["loss"]) == 2


# what compile takes


def mean_error(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


class Largest(keras.Metric):
    """The largest output so far."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable(shape=(), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self):
        return self.value


def hits(y_true, y_pred):
    return keras.ops.cast(
        keras.ops.equal(keras.ops.argmax(y_pred, axis=-1), keras.ops.cast(y_true, "int64")), "float32"
    )


@pytest.mark.wide
def test_metrics_of_every_kind():
    def settings():
        metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="two"), Largest(), hits]
        return {"metrics": metrics, "weighted_metrics": ["accuracy", hits, keras.metrics.SparseCategoricalAccuracy()]}

    def weighted(model):
        history = train(model, sample_weight=WEIGHTS, validation_data=(X, Y, WEIGHTS)).history
        return history, model.evaluate(X, Y, batch_size=20, sample_weight=WEIGHTS, verbose=0)

    _, (history, _) = assert_alike(weighted, settings)
    assert len(history) == 2 * 8


def binary():
    """One output, a probability."""
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((networks.FEATURES,)), L.Dense(8, "tanh"), L.Dense(1, "sigmoid")])


@pytest.mark.wide
def test_metrics_of_probabilities():
    def train_binary(model):
        return fit(model, X, (Y > 2).astype("float32")[:, None], epochs=2)

    def settings():
        metrics = [
            keras.metrics.AUC(name="auc"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.BinaryAccuracy(),
            "mae",
        ]
        return {"loss": "binary_crossentropy", "metrics": metrics}

    _, history = assert_alike(train_binary, settings, binary)
    assert set(history) == {"loss", "auc", "precision", "binary_accuracy", "mae"}


def forked():
    """Two outputs, called one and two."""
    keras.utils.set_random_seed(0)
    x = keras.Input((networks.FEATURES,))
    shared = L.Dense(8, "tanh")(x)
    two = L.Dense(1, name="two")(L.Dense(8, "tanh")(shared))
    return keras.Model(x, {"one": L.Dense(networks.CLASSES, name="one")(shared), "two": two})


def forked_list():
    model = forked()
    return keras.Model(model.input, [model.output["one"], model.output["two"]])


TWO = {"one": Y, "two": X[:, :1]}
LOSSES = {
    "dict": lambda: {
        "loss": {"one": networks.crossentropy(), "two": "mse"},
        "loss_weights": {"one": 1.0, "two": 0.5},
        "metrics": {"one": ["accuracy"], "two": [keras.metrics.MeanAbsoluteError(), mean_error]},
        "weighted_metrics": {"two": ["mae"]},
    },
    "list": lambda: {
        "loss": [networks.crossentropy(), keras.losses.Huber()],
        "loss_weights": [1.0, 0.5],
        "metrics": [["accuracy"], ["mae"]],
    },
    "one of two": lambda: {"loss": {"two": "mse"}, "metrics": {"one": "accuracy"}},
}


@pytest.mark.wide
@pytest.mark.parametrize("form", parameters.by_default(LOSSES, "dict"))
def test_losses_of_several_outputs(form):
    y, weights = TWO, {"one": WEIGHTS, "two": WEIGHTS[::-1].copy()}
    if form == "list":
        y, weights = list(y.values()), list(weights.values())

    def two(model):
        history = fit(model, X, y, sample_weight=weights, epochs=2, validation_data=(X, y)).history
        return history, model.evaluate(X, y, batch_size=20, verbose=0, return_dict=True)

    assert_alike(two, LOSSES[form], forked_list if form == "list" else forked)


SCHEDULES = keras.optimizers.schedules
OPTIMIZERS = {  # others in test_keras.py
    "CosineDecay": lambda: SGD(SCHEDULES.CosineDecay(0.1, 8, warmup_target=0.2, warmup_steps=2)),
    "PiecewiseConstantDecay": lambda: SGD(SCHEDULES.PiecewiseConstantDecay([2, 5], [0.1, 0.05, 0.01]), momentum=0.9),
    "weight_decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipvalue": lambda: SGD(0.1, momentum=0.9, clipvalue=0.01),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_of_optimizers(name):
    def rated(model):
        return train(model, epochs=2).history, float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))

    assert_alike(rated, lambda: {"optimizer": OPTIMIZERS[name]()})


@pytest.mark.wide
def test_options_of_optimizers_that_are_predicted():
    rate = SCHEDULES.ExponentialDecay(0.1, 4, 0.9)
    optimizer = SGD(rate, momentum=0.9, weight_decay=0.01, clipnorm=1.0)
    history = train(compiled("spectrain", optimizer=optimizer), epochs=6).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]


@pytest.mark.parametrize("wanted", [None, False, True])
def test_tensorflow_tunes_no_data_set_that_does_not_ask_for_it(wanted):
    """Else the end of an epoch may wait as long again as the epoch took for the thread that tunes."""
    options = tf.data.Options()
    if wanted is not None:
        options.autotune.enabled = wanted
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).with_options(options)
    given = compiled("spectrain").distribute_strategy.experimental_distribute_dataset(data)
    assert given.options().autotune.enabled is (wanted or False)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["keras", "data-parallel", "1f1b", "spectrain"])
def test_layers_frozen_before_compile_stay_as_they_were(scheme):
    model = compiled(scheme)
    before = model.get_weights()
    model.get_layer("d1").trainable = False
    model.compile(SGD(0.05), networks.crossentropy())
    train(model)
    assert len(model.trainable_weights) == 4
    changed = [not np.array_equal(*pair) for pair in zip(before, model.get_weights())]
    assert changed == [True, True, False, False, True, True]


# one batch at a time


@pytest.mark.wide
@pytest.mark.parametrize("weights", [{"sample_weight": WEIGHTS[:20]}, {"class_weight": {0: 2.0, 1: 0.5, 4: 3.0}}])
def test_training_on_a_batch(weights):
    def losses(model):
        return [model.train_on_batch(X[:20], Y[:20], **weights) for _ in range(3)]

    def logs(model):
        return losses(model), model.train_on_batch(X[20:], Y[20:], return_dict=True)

    assert_alike(logs)
    first, _, last = losses(fresh("spectrain"))
    assert last[0] < first[0]


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["data-parallel", "1f1b"])
def test_batches_that_are_only_looked_at(scheme):
    pm = fresh(scheme)
    train(pm)
    want = pm.model
    want.compile(SGD(0.05), networks.crossentropy(), metrics=["accuracy"])
    np.testing.assert_allclose(pm.predict_on_batch(X), want.predict_on_batch(X), rtol=1e-5, atol=1e-6)
    assert pm.test_on_batch(X, Y) == pytest.approx(want.test_on_batch(X, Y), rel=1e-5)
    got = pm.test_on_batch(X, Y, sample_weight=WEIGHTS, return_dict=True)
    assert got == pytest.approx(want.test_on_batch(X, Y, sample_weight=WEIGHTS, return_dict=True), rel=1e-5)


LOOKS = {
    "predict_on_batch": lambda pm: pm.predict_on_batch(X),
    "test_on_batch": lambda pm: pm.test_on_batch(X, Y),
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_while_training_sees_what_was_in_flight(look):
    pm, seen = fresh("spectrain"), []

    def see(batch, logs):
        seen.append(LOOKS[look](pm))
        pm.stop_training = True

    train(pm, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=see)])
    np.testing.assert_allclose(seen, [LOOKS[look](pm)], rtol=1e-5)


@pytest.mark.parametrize(
    ("moment", "taken"), [("on_train_batch_end", [0, 1]), ("on_epoch_end", [0, 1, 2, 3, 0, 1, 2, 3])]
)
def test_stop_training(moment, taken):
    def stopped(model):
        steps = []
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
        stop = keras.callbacks.LambdaCallback(**{moment: lambda at, logs: setattr(model, "stop_training", at == 1)})
        return train(model, epochs=4, callbacks=[note, stop]).history, steps

    _, (history, steps) = assert_alike(stopped)
    assert steps == taken
    pm = fresh("spectrain")
    other, steps = stopped(pm)
    assert steps == taken
    assert len(other["loss"]) == len(history["loss"])
    assert pm.stop_training


# what a user looks at


@pytest.mark.parametrize("scheme", ["data-parallel", "1f1b", "spectrain"])
def test_the_wrapped_model_s_structure(scheme, capsys):
    pm = fresh(scheme)
    assert [layer.name for layer in pm.layers] == ["d0", "d1", "d2"]
    assert pm.get_layer("d1") is pm.model.get_layer("d1")
    assert pm.get_layer(index=2) is pm.layers[2]
    assert pm.inputs == pm.model.inputs
    assert pm.outputs == pm.model.outputs
    assert pm.input_shape == (None, networks.FEATURES)
    assert pm.output_shape == (None, networks.CLASSES)
    assert pm.count_params() == pm.model.count_params()
    pm.summary()
    mine = capsys.readouterr().out
    pm.model.summary()
    assert mine.endswith(capsys.readouterr().out)


@pytest.mark.parametrize("scheme", ["1f1b", "spectrain"])
def test_the_wrapped_model_s_variables(scheme):
    pm = fresh(scheme)
    train(pm)
    for name in ("weights", "trainable_weights", "non_trainable_weights", "variables"):
        mine, wrapped = getattr(pm, name), getattr(pm.model, name)
        assert [variable.path for variable in mine] == [variable.path for variable in wrapped]
        assert_equal(mine, wrapped)
    assert pm.metrics_names == fresh("keras").metrics_names
    assert [metric.name for metric in pm.metrics] == [metric.name for metric in fresh("keras").metrics]


@pytest.mark.parametrize("scheme", ["keras", "1f1b", "spectrain"])
def test_the_count_of_steps_in_a_batch_callback(scheme):
    model, counts = fresh(scheme), []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: counts.append(int(model.optimizer.iterations))
    )
    train(model, callbacks=[look])
    assert counts == [1, 2, 3, 4]


def plain_and_pipeline(make_optimizer, **settings):
    """An MLP trained by Keras, and its equal as a synchronous pipeline."""
    plain, model = networks.mlp(), networks.mlp()
    plain.compile(make_optimizer(plain), networks.crossentropy())
    pm = pipetrain.PipelineModel(model, cuts=networks.cuts(6, 3), scheme="1f1b", microbatches=1, **settings)
    pm.compile(make_optimizer(model), networks.crossentropy())
    return plain, pm


@pytest.mark.wide
@pytest.mark.parametrize("by", parameters.by_default(["name", "variable"], "name"))
def test_weights_excluded_from_decay_stay_excluded(by):
    def optimizer(model):
        chosen = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        if by == "name":
            chosen.exclude_from_weight_decay(var_names=["kernel"])
        else:
            chosen.exclude_from_weight_decay(var_list=[model.layers[1].kernel])
        return chosen

    plain, pm = plain_and_pipeline(optimizer)
    for model in (plain, pm):
        fit(model, *networks.data(200))
    networks.assert_close(pm.get_weights(), plain.get_weights(), 2e-5)
