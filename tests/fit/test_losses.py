"""Losses that are not reduced, that only layers add, or that look at all rows at once."""

from __future__ import annotations

import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from networks import fit, normal, one_layer

import pipetrain
from pipetrain.schemes.table import NAMES

L = keras.layers
SYNCHRONOUS = ["gpipe", "1f1b"]
OUT = 3


def model(outputs=1):
    keras.utils.set_random_seed(0)
    x = keras.Input((networks.FEATURES,))
    y = L.Dense(6, "tanh", name="second")(L.Dense(8, "tanh", name="first")(x))
    made = [L.Dense(OUT, name=f"out{n}")(y) for n in range(outputs)]
    return keras.Model(x, made if outputs > 1 else made[0])


def sequences():
    keras.utils.set_random_seed(0)
    x = keras.Input((networks.FEATURES,))
    y = L.Dense(8, "tanh", name="first")(L.Reshape((4, 3))(x))
    return keras.Model(x, L.Dense(OUT, name="out0")(y))


def data(shape=(OUT,)):
    rng = np.random.default_rng(1)
    return networks.data(100)[0], rng.normal(size=(100, *shape)).astype("float32")


def run(built, loss, x, y, optimizer=None, sample_weight=None, **settings):
    """The loss of every step, and the weights."""
    how = {"scheme": "1f1b", "microbatches": 1, **settings} if settings else {}
    pm = networks.in_way(built, **how) if how else built
    pm.compile(optimizer or keras.optimizers.SGD(0.005, momentum=0.9), loss)
    losses = []
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    networks.fit(pm, x, y, sample_weight=sample_weight, callbacks=[keep])
    return losses, pm.get_weights()


def assert_alike(got, expected):
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    networks.assert_close(got[1], expected[1])


def unreduced(kind=keras.losses.MeanSquaredError, reduction="none"):
    return kind(reduction=reduction)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "microbatches", "reduction"), parameters.combinations(SYNCHRONOUS, [1, 3], ["none", None])
)
def test_losses_that_are_not_reduced_train_as_in_plain_keras(scheme, microbatches, reduction):
    loss = unreduced(reduction=reduction)
    got = run(model(), loss, *data(), cuts=("first",), scheme=scheme, microbatches=microbatches)
    assert_alike(got, run(model(), loss, *data()))


@pytest.mark.parametrize("microbatches", parameters.by_default([1, 3], wide=(3,)))
def test_nor_of_sequences(microbatches):
    settings = {"cuts": ("first",), "microbatches": microbatches}
    expected = run(sequences(), unreduced(), *data((4, OUT)))
    assert_alike(run(sequences(), unreduced(), *data((4, OUT)), **settings), expected)


@pytest.mark.wide
@pytest.mark.parametrize("microbatches", parameters.by_default([1, 3], 3))
def test_nor_of_several_outputs_sample_weights_or_replicas(microbatches):
    settings = {"cuts": ("first",), "microbatches": microbatches}
    x, y = data()
    both, labels = [unreduced(), unreduced(keras.losses.MeanAbsoluteError)], [y, -y]
    assert_alike(run(model(2), both, x, labels, **settings), run(model(2), both, x, labels))
    weights = np.linspace(0.0, 2.0, 100)
    expected = run(model(), unreduced(), x, y, sample_weight=weights)
    assert_alike(run(model(), unreduced(), x, y, sample_weight=weights, **settings), expected)
    assert_alike(run(model(), unreduced(), x, y, sample_weight=weights, **settings, replicas=(1, 3)), expected)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default([*NAMES], "2bw"))
def test_in_every_scheme_their_gradients_are_those_of_the_sum(scheme):
    how = {"stages": 1} if scheme in ("single", "data-parallel") else {"cuts": ("first", "second")}
    x, y = data()
    got, expected = (
        run(model(), unreduced(reduction=reduction), x, y, scheme=scheme, microbatches=None, **how)
        for reduction in ("none", "sum")
    )
    networks.assert_close(got[1], expected[1], 1e-6)
    rows = 20
    np.testing.assert_allclose(np.cumsum(got[0]) * rows / np.arange(1, 6), np.cumsum(expected[0]) / np.arange(1, 6))


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(SYNCHRONOUS, "1f1b"))
def test_mean_is_sum_over_batch_size(scheme):
    loss = unreduced(reduction="mean")
    assert_alike(
        run(model(), loss, *data(), cuts=("first",), scheme=scheme, microbatches=4), run(model(), loss, *data())
    )


@pytest.mark.wide
def test_a_mean_beside_a_sum_trains_as_in_plain_keras():
    x, y = data()
    loss = ["mse", keras.losses.MeanSquaredError(reduction="sum")]
    got = run(model(2), loss, x, [y, y], cuts=("first",), microbatches=3)
    assert_alike(got, run(model(2), loss, x, [y, y]))


def test_a_loss_that_is_not_reduced_beside_a_mean_is_refused_where_the_batch_is_divided():
    x, y = data()
    loss = ["mse", unreduced()]
    with pytest.raises(ValueError, match=r"cannot be put together.*reduction=\['mean', 'none'\].*microbatches=1"):
        run(model(2), loss, x, [y, y], cuts=("first",), microbatches=2)


@pytest.mark.wide
@pytest.mark.parametrize("axis", [None, (1,)])
def test_a_loss_of_all_rows_at_once_is_refused_where_the_batch_is_divided(axis):
    x, y = data()
    loss, y = keras.losses.Dice(axis=axis), (y > 0).astype("float32")
    if axis is None:
        with pytest.raises(ValueError, match=r"neither a mean nor a sum"):
            run(model(), loss, x, y, cuts=("first",), microbatches=2)
    microbatches = 1 if axis is None else 2
    slow = lambda: keras.optimizers.SGD(1e-4)  # noqa: E731
    got = run(model(), loss, x, y, slow(), cuts=("first",), microbatches=microbatches)
    assert_alike(got, run(model(), loss, x, y, slow()))


class Adds(L.Layer):
    """Adds a loss of its own."""

    def __init__(self, loss, **settings):
        super().__init__(**settings)
        self.loss = loss

    def call(self, x, *others):
        self.add_loss(self.loss(x, *others))
        return x

    def get_config(self):
        return {**super().get_config(), "loss": self.loss}


def autoencoder():
    """Two losses of layers, in different stages, none compiled."""
    keras.utils.set_random_seed(0)
    x = keras.Input((networks.FEATURES,))
    code = Adds(lambda z: 0.1 * tf.reduce_mean(z**2), name="small")(L.Dense(4, "tanh", name="first")(x))
    y = L.Dense(networks.FEATURES, name="last")(L.Dense(6, "tanh", name="second")(code))
    return keras.Model(x, Adds(lambda y, x: tf.reduce_mean((y - x) ** 2), name="same")(y, x))


class Sampled(L.Layer):
    """A code drawn around a mean, as variational autoencoders have it."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seed = keras.random.SeedGenerator(5)

    def call(self, mean, log_variance):
        self.add_loss(-0.05 * tf.reduce_mean(1.0 + log_variance - mean**2 - tf.exp(log_variance)))
        return mean + tf.exp(0.5 * log_variance) * keras.random.normal(tf.shape(mean), seed=self.seed)


def variational():
    keras.utils.set_random_seed(0)
    x = keras.Input((networks.FEATURES,))
    y = L.Dense(6, "tanh", name="first")(x)
    z = Sampled(name="sampled")(L.Dense(3, name="mean")(y), L.Dense(3, name="spread")(y))
    y = L.Dense(networks.FEATURES, name="last")(L.Dense(6, "tanh", name="second")(z))
    return keras.Model(x, Adds(lambda y, x: tf.reduce_mean((y - x) ** 2), name="same")(y, x))


@pytest.mark.parametrize(
    ("built", "cuts"),
    parameters.combinations(
        [autoencoder, variational],
        [("second",), ("first",), ("first", "second", "last")],
        default=[(autoencoder, ("second",))],
        wide=[(variational, ("first", "second", "last"))],
    ),
)
def test_losses_that_layers_alone_add_train_as_in_plain_keras(built, cuts):
    x, _ = data()
    assert_alike(run(built(), None, x, None, cuts=cuts), run(built(), None, x, None))


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(SYNCHRONOUS, "gpipe"))
def test_and_in_microbatches(scheme):
    x, _ = data()
    got = run(autoencoder(), None, x, None, cuts=("first", "second"), scheme=scheme, microbatches=4)
    assert_alike(got, run(autoencoder(), None, x, None))


REDUCED = {
    "sum": lambda z, *others: 0.01 * tf.reduce_sum(z**2),
    "each": lambda z, *others: 0.05 * tf.reduce_mean(z**2, axis=-1),
    "spread": lambda z, *others: tf.math.reduce_std(z),
}


SUMS, MORE_SUMS = [("gpipe", None, "each")], [("1f1b", (2, 3), "sum")]


def penalized(first, second="sum"):
    """Losses of layers in two stages beside a regularizer and the compiled one."""
    keras.utils.set_random_seed(0)
    x = keras.Input((networks.FEATURES,))
    y = Adds(REDUCED[first], name="one")(L.Dense(6, "tanh", kernel_regularizer="l2", name="first")(x))
    y = L.Dense(OUT, activity_regularizer="l2", name="last")(L.Dense(6, "tanh", name="second")(y))
    return keras.Model(x, Adds(REDUCED[second], name="two")(y))


@pytest.mark.parametrize(
    ("scheme", "replicas", "first"),
    parameters.combinations(["gpipe", "1f1b"], [None, (2, 3)], ["sum", "each"], default=SUMS, wide=MORE_SUMS),
)
def test_losses_of_layers_that_are_sums_over_rows_stay_sums(scheme, replicas, first):
    x, y = data()
    divided = {"microbatches": 3, "replicas": replicas} if replicas else {"microbatches": 4}
    got = run(penalized(first), "mse", x, y, cuts=("one",), scheme=scheme, **divided)
    assert_alike(got, run(penalized(first), "mse", x, y))


def test_beside_a_compiled_loss_that_is_a_sum_penalties_count_once_a_minibatch():
    def trained(**settings):
        networks.draw_from(0)
        built = keras.Sequential([keras.Input((networks.FEATURES,)), L.Dense(OUT, kernel_regularizer="l2")])
        return run(built, unreduced(reduction="sum"), *(each[:40] for each in data()), **settings)

    assert_alike(trained(stages=1, microbatches=2), trained())


def test_and_where_a_minibatch_is_divided_for_evaluation():
    built, (x, y) = penalized("sum", "each"), data()
    pm = pipetrain.PipelineModel(built, cuts=("one",), replicas=(2, 2), scheme="1f1b", microbatches=1)
    for each in (built, pm):
        each.compile(keras.optimizers.SGD(0.1), "mse")
    np.testing.assert_allclose(pm.evaluate(x, y, verbose=0), built.evaluate(x, y, verbose=0), rtol=1e-5)


@pytest.mark.wide
def test_a_layer_s_loss_that_is_neither_is_refused_where_the_batch_is_divided():
    x, y = data()
    with pytest.raises(ValueError, match=r"neither a mean nor a sum.*4 rows.*microbatches=1"):
        run(penalized("spread"), "mse", x, y, cuts=("one",), microbatches=2)
    assert_alike(run(penalized("spread"), "mse", x, y, cuts=("one",)), run(penalized("spread"), "mse", x, y))


@pytest.mark.wide
def test_layers_that_draw_are_told_apart_from_those_whose_losses_are_neither():
    x, _ = data()
    losses, _ = run(variational(), None, x, None, cuts=("first",), microbatches=4)
    assert np.isfinite(losses).all()


def supervised(by_layer):
    """Labels as a second input and a layer's loss, or a compiled loss."""
    keras.utils.set_random_seed(0)
    x, label = keras.Input((networks.FEATURES,)), keras.Input((OUT,))
    y = L.Dense(OUT, name="last")(L.Dense(6, "tanh", name="second")(L.Dense(8, "tanh", name="first")(x)))
    out = Adds(lambda y, label: tf.reduce_mean((y - label) ** 2), name="same")(y, label) if by_layer else y
    return keras.Model([x, label], out if by_layer else L.Add()([y, 0.0 * label]))


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default([*NAMES], "spectrain"))
def test_in_every_scheme_such_a_loss_is_as_good_as_a_compiled_one(scheme):
    how = {"stages": 1} if scheme in ("single", "data-parallel") else {"cuts": ("first", "second")}
    x, y = data()
    how |= {"scheme": scheme, "microbatches": None}
    got, expected = run(supervised(True), None, [x, y], None, **how), run(supervised(False), "mse", [x, y], y, **how)
    assert_alike(got, expected)


def test_such_a_model_is_evaluated_as_in_plain_keras():
    built, (x, _) = autoencoder(), data()
    pm = pipetrain.PipelineModel(built, cuts=("first",), scheme="spectrain")
    for each in (built, pm):
        each.compile(keras.optimizers.SGD(0.1))
    np.testing.assert_allclose(pm.evaluate(x, verbose=0), built.evaluate(x, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("scheme", ["spectrain", "1f1b"])
def test_no_loss_at_all_is_refused_before_training(scheme):
    pm = pipetrain.PipelineModel(model(), cuts=("first",), scheme=scheme)
    pm.compile(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=r"nothing to minimise.*loss=None.*Try loss='mse'"):
        networks.fit(pm, data()[0], None)


@pytest.mark.wide
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_a_loss_function_is_divided_as_it_reduces(reduce):
    """A sum was taken for a mean, so that gradients were too small by the number of microbatches."""
    x, y, weights = normal(42, 4), normal(42, 2), []

    def loss(y, outputs):
        return getattr(keras.ops, reduce)(keras.ops.square(y - outputs))

    for pipeline in (False, True):
        model = one_layer(L.ReLU())
        if pipeline:
            model = pipetrain.PipelineModel(model, stages=2, scheme="1f1b", microbatches=3)
        model.compile(keras.optimizers.SGD(0.001), loss)
        if reduce == "max" and pipeline:
            with pytest.raises(ValueError, match="cannot be put together"):
                fit(model, x, y, batch_size=8)
            return
        fit(model, x, y, batch_size=8)
        weights.append(model.get_weights())
    networks.assert_close(weights[1], weights[0], 1e-5)
