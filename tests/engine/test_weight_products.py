"""Weight gradients that are made once for all microbatches, and gradients that are sent before an update."""

from __future__ import annotations

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf

import pipetrain
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.weight_products import WeightProduct, made, over_any_rows, products
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import plan
from pipetrain.plan.profile import BlockProfile, Profile

L = keras.layers
ROWS, WIDTH = 16, 96  # of so few rows the factors are fewer bytes than the product


def wide():
    """Convolutions, then wide dense layers, one of them on several words of each example."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 6, 1))
    x = L.Conv2D(4, 3, name="convolution")(inputs)
    x = L.Dense(WIDTH, activation="tanh", name="first")(L.Flatten()(x))
    x = L.Dense(WIDTH, name="without_bias", use_bias=False)(x)
    x = L.Dense(WIDTH, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-3), name="penalized")(x)
    x = L.Reshape((3, WIDTH // 3))(x)
    x = L.Dense(WIDTH // 3, activation="tanh", name="words")(x)
    x = L.Dense(WIDTH, activation="tanh", name="flat")(L.Flatten()(x))
    return keras.Model(inputs, L.Dense(networks.CLASSES, name="logits")(x))


def images(rows=104):
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 6, 6, 1)).astype("float32"), random.integers(0, networks.CLASSES, rows)


def stages_of(pm):
    return [stage for replicas in inside.replicas(pm) for stage in replicas]


def once(pm):
    """The layers whose gradients are products."""
    return {
        stage._groups.originals[n].path.split("/")[-2]
        for stage in stages_of(pm)
        for n, each in enumerate(stage._backward.like)
        if isinstance(each, WeightProduct)
    }


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "optimizer", "settings"),
    [
        ("1f1b", "sgd", {}),
        ("gpipe", "adam", {}),
        *parameters.rarely(
            ("gpipe", "sgd", {}), ("1f1b", "sgd", {"recompute": True}), ("1f1b", "sgd", {"jit_compile": True})
        ),
    ],
)
def test_training_equals_the_unsplit_model(scheme, optimizer, settings):
    """The last batch of 8 rows too."""
    model, (x, y) = wide(), images()
    make = {"sgd": lambda: keras.optimizers.SGD(0.02, momentum=0.9), "adam": lambda: keras.optimizers.Adam(1e-3)}
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    plain.compile(make[optimizer](), networks.crossentropy())
    plain.fit(x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    cuts = ["first", "penalized"]
    pm = networks.pipeline(model, optimizer=make[optimizer](), scheme=scheme, cuts=cuts, microbatches=4, **settings)
    networks.fit(pm, x, y, batch_size=ROWS, epochs=2)
    networks.assert_close(pm.get_weights(), plain.get_weights())
    assert once(pm) == {"first", "without_bias", "flat"}


@pytest.mark.wide
def test_more_rows_are_decided_on_anew():
    """Of so many rows the factors are more bytes; the optimizer goes on."""
    model, (x, y) = wide(), images(128)
    pm = networks.pipeline(model, cuts=["first", "penalized"], scheme="1f1b", microbatches=4)
    networks.fit(pm, x, y, batch_size=ROWS)
    assert once(pm)
    networks.fit(pm, x, y, batch_size=64)
    assert not once(pm)
    assert int(pm.optimizer.iterations) == 8 + 2
    networks.fit(pm, x, y, batch_size=ROWS)
    assert not once(pm)


class Words(L.Layer):
    """Of each example 8 rows, the activation before they are an example's again."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(WIDTH, WIDTH), name="kernel")

    def call(self, x):
        rows = keras.ops.relu(keras.ops.matmul(keras.ops.reshape(x, (-1, WIDTH)), self.kernel))
        return keras.ops.reshape(rows, (-1, 8, WIDTH))


def test_rows_of_one_example_count():
    inputs = keras.Input((8, WIDTH))
    x = Words(name="in_words")(inputs)
    x = L.Dense(WIDTH, name="flat")(L.Flatten()(x))
    model = keras.Model(inputs, L.Dense(networks.CLASSES)(x))
    pm = networks.pipeline(model, cuts=["in_words"], scheme="1f1b", microbatches=4)
    x = np.random.default_rng(0).normal(size=(32, 8, WIDTH)).astype("float32")
    networks.fit(pm, x, np.zeros(32, int), batch_size=ROWS)
    assert once(pm) == {"flat"}


@pytest.mark.wide
def test_an_unknown_number_of_rows_is_not_relied_on():
    pm = networks.pipeline(wide(), cuts=["first", "penalized"], scheme="1f1b", microbatches=4)
    pairs = iter([images(ROWS)] * 2)
    pm.fit(((x, y) for x, y in pairs), steps_per_epoch=2, verbose=0)
    assert not once(pm)


@pytest.mark.wide
@pytest.mark.parametrize("settings", [{"scheme": "1f1b", "microbatches": 1}, {"scheme": "spectrain"}])
def test_nothing_waits_where_nothing_is_summed(settings):
    pm = networks.pipeline(wide(), cuts=["first", "penalized"], **settings)
    networks.fit(pm, *images(32), batch_size=ROWS)
    assert not once(pm)


@pytest.mark.wide
def test_clipping_by_the_norm_of_all_gradients_makes_them_first():
    optimizer = keras.optimizers.SGD(0.02, global_clipnorm=0.1)
    pm = networks.pipeline(wide(), optimizer=optimizer, cuts=["first", "penalized"], scheme="1f1b", microbatches=4)
    networks.fit(pm, *images(32), batch_size=ROWS)
    assert not once(pm)


def test_factors_of_fewer_bytes_than_the_product():
    """``rows * (in + out) < in * out``, of 3 rows for each example as well."""

    def found(rows):
        made = []

        def gradients(x, g, words):
            flat = tf.reshape(words, [-1, 8])
            made.extend([tf.matmul(x, g, transpose_a=True), tf.matmul(x, tf.transpose(x)), tf.transpose(x), None])
            made.append(tf.matmul(flat, tf.nn.relu(flat), transpose_a=True))
            return [each for each in made if each is not None]

        specs = tf.TensorSpec([rows, 8]), tf.TensorSpec([rows, 24]), tf.TensorSpec([rows, 3, 8])
        tf.function(gradients, autograph=False).get_concrete_function(*specs)
        return made

    assert over_any_rows(found(None)) == {0, 4}
    assert over_any_rows(found(2)) == set()
    assert products(found(None), 2, 2) == set()
    assert [products(found(2), 2, rows) for rows in (1, 2, 5, 6)] == [{0, 4}, {0}, {0}, set()]


def test_products_of_rows_are_summed_by_joining_them():
    random = np.random.default_rng(0)
    one, two = (WeightProduct((random.normal(size=(rows, 3)),), (random.normal(size=(rows, 5)),)) for rows in (4, 2))
    want = sum(each.inputs[0].T @ each.gradients[0] for each in (one, two))
    first, second, none = made([one.joined(two), tf.ones([2]), None])
    np.testing.assert_allclose(first, want)
    np.testing.assert_array_equal(second, [1, 1])
    assert none is None


@pytest.mark.wide
def test_a_stage_gets_its_gradients_before_the_next_one_updates(monkeypatch):
    """Which it would otherwise wait for, idle."""
    update, slow_s = Stage.update, 0.3

    def slow(self, *arguments):
        return networks.after(slow_s, lambda: update(self, *arguments))

    monkeypatch.setattr(Stage, "update", slow)
    pm = networks.pipeline(networks.mlp(), stages=2, scheme="1f1b", microbatches=2)
    networks.fit(pm, *networks.data(20), batch_size=20)
    arrived_s = max(each.end_s for each in pm.trace.transfers if each.op == "B")
    updated_s = max(span.end_s for span in pm.trace.spans if span.stage == 1)
    assert arrived_s + slow_s / 2 < updated_s


@pytest.mark.wide
def test_a_profile_tells_them_and_a_simulation_makes_them_with_the_update():
    measured = pipetrain.profile(wide(), ROWS, verbose=False, budget_s=None)
    found = {block.name: block.product_bytes for block in measured.blocks if block.product_bytes}
    assert found == {"first": 4 * 64 * WIDTH, "without_bias": 4 * WIDTH**2, "flat": 4 * WIDTH**2}
    assert Profile.from_json(measured.to_json()) == measured

    def step_s(product_bytes):
        block = BlockProfile("b", 1.0, 2.0, 0, 8, update_s=1.0, product_bytes=product_bytes)
        training = Training("1f1b", microbatches=4)
        cut = plan(Profile("m", 8, (block, block)), [1, 2], Cluster(), training=training)
        assert [stage.product_s for stage in cut.stages] == [product_bytes / 8] * 2
        return pipetrain.simulate(cut, "1f1b", Cluster(), 20, microbatches=4, overhead_s=0.0).step_s

    # Microbatches of 0.25 forward, 0.25 and 0.25 backward; 3 sums of 0.6; updates of 1, of which one stage's is hidden.
    assert step_s(0) == pytest.approx(0.25 + 4 * 0.75 + 3 * 0.6 + 0.5 + 0.6 + 1, rel=1e-4)
    assert step_s(8) == pytest.approx(0.25 + 4 * 0.5 + 0.25 + 1 + 1, rel=1e-4)
