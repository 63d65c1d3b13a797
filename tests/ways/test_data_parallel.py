"""Data parallelism by MirroredStrategy, under the same interface as the pipelines: the model itself is trained."""

from __future__ import annotations

from functools import partial

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from networks import fit

import pipetrain


@pytest.mark.slow
def test_early_stopping_restores_the_best_weights():
    x, y = networks.data(80)
    pm, kept = networks.pipeline(scheme="data-parallel", optimizer=keras.optimizers.SGD(3.0)), []
    stop = keras.callbacks.EarlyStopping("val_loss", restore_best_weights=True)
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: kept.append((logs["val_loss"], pm.get_weights()))
    )
    fit(pm, x, y, epochs=6, validation_data=(x, y), callbacks=[keep, stop])
    networks.assert_close(pm.get_weights(), min(kept, key=lambda pair: pair[0])[1])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("width", "devices"),
    [(8, 3), pytest.param(16, 3, marks=pytest.mark.slow), pytest.param(8, 2, marks=pytest.mark.slow)],
)
def test_one_model_after_another_trains_on_batches_that_do_not_divide(width, devices):
    """The second strategy of a process met the first one's collective operations."""
    x, y = networks.data(70)
    names = [f"CPU:{n}" for n in range(devices)]
    pm = pipetrain.PipelineModel(networks.mlp(width=width), scheme="data-parallel", devices=names)
    pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy(), metrics=["accuracy"])
    history = pm.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), verbose=0).history
    assert history["loss"][1] < history["loss"][0]


@pytest.mark.wide
def test_a_shuffled_data_set_is_read_from_its_beginning():
    """Its first batch was read before training, for its shapes: a data set that shuffles anew then began otherwise."""
    x, y = networks.data(96)
    losses = {}
    for scheme in ("single", "data-parallel"):
        model = pipetrain.PipelineModel(networks.small(), scheme=scheme, devices=("CPU:0", "CPU:1"))  # and a new seed
        model.compile(keras.optimizers.SGD(0.0), networks.crossentropy())
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=3, reshuffle_each_iteration=True)
        losses[scheme] = []
        seen = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, seen=losses[scheme]: seen.append(float(logs["loss"]))
        )
        model.fit(data.batch(16), epochs=2, verbose=0, callbacks=[seen])
    np.testing.assert_allclose(losses["data-parallel"], losses["single"], rtol=1e-5)


@pytest.mark.wide
def test_data_parallel_equals_one_device():
    x, y = networks.data(160)
    pm = networks.pipeline(scheme="data-parallel", devices=("CPU:0", "CPU:1"))
    single = networks.mlp()
    single.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy(), metrics=["accuracy"])
    for model in (pm, single):
        model.fit(x, y, batch_size=16, shuffle=False, epochs=2, verbose=0)
    networks.assert_close(pm.get_weights(), single.get_weights())


@pytest.mark.wide
@pytest.mark.parametrize("clips", [{"clipnorm": 0.1}, {"clipvalue": 0.01}, {"global_clipnorm": 0.1}])
def test_the_gradients_of_the_whole_minibatch_are_clipped(clips):
    x, y = networks.data(80)
    pm = networks.pipeline(scheme="data-parallel", devices=("CPU:0", "CPU:1"))
    plain = networks.mlp()
    for model in (pm, plain):
        model.compile(keras.optimizers.SGD(0.5, **clips), networks.crossentropy())
        fit(model, x, y)
    networks.assert_close(pm.get_weights(), plain.get_weights())


L, ops = keras.layers, keras.ops
TWO = {"scheme": "data-parallel", "devices": ("CPU:0", "CPU:1")}
ROWS = 49  # in minibatches of 16: the last one has fewer rows than there are devices


class Scaled(keras.Layer):
    """A layer without a config, which has a function and another layer."""

    def __init__(self, function):
        super().__init__()
        self.function, self.dense = function, L.Dense(6, kernel_regularizer="l2")

    def call(self, inputs):
        return self.function(self.dense(inputs))


def pictures():
    return np.random.default_rng(0).normal(300, 50, (ROWS, 4)).astype("float32")


def classes():
    return np.random.default_rng(1).integers(0, 3, ROWS)


def own():
    """Layers that no config tells the whole of: what they have learnt of data, and Python's functions."""
    keras.utils.set_random_seed(0)
    adapted = L.Normalization()
    adapted.adapt(pictures())
    x = inputs = keras.Input((4,))
    x = Scaled(lambda t: 2 * t)(adapted(x))
    x = L.Lambda(lambda t: ops.tanh(t))(x)
    return keras.Model(inputs, L.Dense(3, name="last")(x))


def one_number(reduce):
    def loss(y, outputs):
        return reduce(keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True))

    return loss


class Halving(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(0.5 * gradient, variable) for gradient, variable in grads_and_vars])


class UnitLength(keras.optimizers.SGD):
    """Looks at all gradients at once."""

    def apply(self, grads, trainable_variables=None):
        length = ops.sqrt(sum(ops.sum(each**2) for each in grads))
        return super().apply([each / length for each in grads], trainable_variables)


class Meddling(keras.callbacks.Callback):
    """Clips a kernel that it finds by the layer's name, and notes what it reads."""

    def __init__(self):
        super().__init__()
        self.read = []

    def on_train_batch_end(self, batch, logs=None):
        kernel = self.model.get_layer("last").kernel
        self.read.append(kernel.numpy())
        kernel.assign(ops.clip(kernel, -0.3, 0.3))
        self.model.optimizer.learning_rate = 0.05 / (batch + 1)


def trained(how, optimizer=None, loss=None, make=own, callbacks=(), **settings):
    """Weights, losses and predictions."""
    model = make()
    fitted = networks.in_way(model, **how) if how else model
    fitted.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss or networks.crossentropy(), **settings)
    meddling = [each() for each in callbacks]
    history = fit(fitted, pictures(), classes(), batch_size=16, epochs=2, callbacks=meddling).history
    evaluated = fitted.evaluate(pictures(), classes(), batch_size=16, verbose=0)
    predicted = fitted.predict(pictures(), batch_size=16, verbose=0)
    read = [each for callback in meddling for each in callback.read]
    return [*model.get_weights(), *map(np.array, history.values()), np.array(evaluated), predicted, *read]


ALIKE = {
    "its layers": {},
    "a sum": {"loss": lambda: networks.crossentropy(reduction="sum"), "optimizer": lambda: keras.optimizers.SGD(0.002)},
    "one number, a mean": {"loss": lambda: one_number(ops.mean)},
    "one number, a sum": {"loss": lambda: one_number(ops.sum), "optimizer": lambda: keras.optimizers.SGD(0.002)},
    "a number for each row": {"loss": lambda: one_number(lambda each: each)},
    "what is called": {"loss": lambda: partial(one_number(ops.mean)), "optimizer": lambda: "adam"},
    "a callback": {"callbacks": (Meddling,), "metrics": ["accuracy"]},
    "an optimizer's apply": {"optimizer": lambda: UnitLength(0.05)},
    "an optimizer's apply_gradients": {"optimizer": lambda: Halving(0.05)},
}


@pytest.mark.parametrize(
    "name",
    parameters.by_default(ALIKE, "its layers", wide=("one number, a sum", "what is called", "a callback")),
)
def test_the_model_itself_is_trained_on_rows_that_do_not_divide(name):
    """Not a copy made of its config, which had neither statistics nor what a callback assigned; and by rows."""
    given = dict(ALIKE[name])
    made = {key: given.pop(key) for key in ("loss", "optimizer") if key in given}
    plain, pm = (trained(how, **{key: make() for key, make in made.items()}, **given) for how in ({}, TWO))
    for mine, theirs in zip(pm, plain, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.wide
def test_after_training_the_variables_are_by_themselves():
    model, optimizer = networks.small(), keras.optimizers.Adam(0.01)
    metric = keras.metrics.SparseCategoricalAccuracy()
    values = [id(each.value) for each in (*model.variables, *metric.variables)]
    pm = networks.in_way(model, **TWO)
    pm.compile(optimizer, networks.crossentropy(), metrics=[metric])
    x, y = networks.data(30)
    fit(pm, x, y, validation_data=(x, y))
    pm.predict(x, verbose=0)
    assert [id(each.value) for each in (*model.variables, *metric.variables)] == values
    assert all(isinstance(each.value, tf.Variable) for each in optimizer.variables)
    assert float(metric.result()) > 0
    networks.assert_close([model.predict(x, verbose=0)], [pm.predict(x, verbose=0)])


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class Summing(keras.Layer):
    def call(self, inputs):
        self.add_loss(ops.sum(inputs**2))
        return inputs


def remembering():
    x = inputs = keras.Input((2, 3), batch_size=4)
    return keras.Model(inputs, L.Dense(2)(L.LSTM(2, stateful=True)(x)))


def overriding():
    inputs = keras.Input((4,))
    return OwnStep(inputs, L.Dense(3)(inputs))


def summing():
    inputs = keras.Input((4,))
    return keras.Model(inputs, L.Dense(3)(Summing()(inputs)))


def normalizing():
    inputs = keras.Input((4,))
    return keras.Model(inputs, L.Dense(3)(L.BatchNormalization()(inputs)))


@pytest.mark.parametrize(
    ("make", "loss", "error", "match"),
    [
        (overriding, None, TypeError, "overrides train_step"),
        (remembering, None, ValueError, "stateful recurrent layer.*all-reduce"),
        (summing, None, ValueError, "sum over rows.*all-reduce"),
        (normalizing, None, ValueError, "leaves a device without rows.*a minibatch of 1 row, 2 devices"),
        (own, {"ignore_class": 0}, ValueError, "divided by, no device knows.*all-reduce"),
        (own, {"reduction": None}, ValueError, "not reduced.*all-reduce"),
    ],
)
def test_what_devices_would_train_otherwise_is_refused_by_name(make, loss, error, match):
    with pytest.raises(error, match=match):
        trained(TWO, make=make, loss=loss and networks.crossentropy(**loss))


@pytest.mark.parametrize(
    ("rows", "batch_size", "devices"), [(4, 8, 3), *parameters.widely((12, 4, 3), (9, 8, 2), (3, 1, 2))]
)
def test_rows_that_leave_a_device_without_are_refused_before_training(rows, batch_size, devices):
    """TensorFlow gives each device ceil(rows / devices) of them, as long as there are some."""
    pm = networks.pipeline(normalizing(), scheme="data-parallel", devices=tuple(f"CPU:{n}" for n in range(devices)))
    assert inside.distribution(pm).num_replicas_in_sync == devices  # though the model has two layers
    first = pm.get_weights()
    with pytest.raises(ValueError, match=r"leaves a device without rows.*Received: a minibatch of \d row"):
        fit(pm, pictures()[:rows], classes()[:rows], batch_size=batch_size)
    networks.assert_equal(pm.get_weights(), first)


@pytest.mark.wide
def test_few_rows_are_evaluated_and_other_data_are_read():
    """No statistics are gathered in an evaluation; generators and PyDatasets do not tell their rows."""
    pm, x, y = networks.pipeline(normalizing(), **TWO), pictures(), classes()
    history = fit(pm, x[:32], y[:32], batch_size=16, validation_data=(x[:17], y[:17])).history
    assert np.isfinite(history["val_loss"]).all()
    assert np.isfinite(pm.evaluate(x[:17], y[:17], batch_size=16, verbose=0)).all()
    pm.fit(((x[n : n + 16], y[n : n + 16]) for n in (0, 16)), verbose=0)
    pm.fit(OfArrays(x[:32], y[:32]), verbose=0)


class OfArrays(keras.utils.PyDataset):
    """Minibatches of sixteen rows."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x) // 16

    def __getitem__(self, n):
        return self.x[16 * n : 16 * (n + 1)], self.y[16 * n : 16 * (n + 1)]


def test_too_few_rows_of_a_data_set_are_refused_when_they_come():
    """Not one weight is NaN; with a number of steps the rows that do not fit are never read."""
    pm = networks.pipeline(normalizing(), **TWO)
    fit(pm, pictures(), classes(), batch_size=16, steps_per_epoch=ROWS // 16)
    rows = tf.data.Dataset.from_tensor_slices((pictures(), classes()))
    with pytest.raises(tf.errors.InvalidArgumentError, match="leaves a device without rows"):
        pm.fit(rows.batch(16), verbose=0)
    assert all(np.isfinite(each).all() for each in pm.get_weights())
