"""Models that are no chains: cut anywhere, they compute and learn what the whole model does."""

from __future__ import annotations

import os
import subprocess
import sys

import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
import transparency
from graph_models import (
    L,
    a_layer_of_two_calls,
    compiled,
    frozen_start,
    many_inputs_and_outputs,
    nested,
    opaque_inside,
    reused_activation,
    siamese,
    skips,
    tied,
    tokens_and_numbers,
    u_net,
)
from networks import fit, normal

import pipetrain
from pipetrain.compute.graph.blocks import Chain, cut_points

MODELS = [
    skips,
    many_inputs_and_outputs,
    siamese,
    nested,
    tied,
    u_net,
    frozen_start,
    opaque_inside,
    reused_activation,
    a_layer_of_two_calls,
]


@pytest.mark.parametrize("counts", parameters.by_default([(1, 3), (2, 4)], (2, 4)))
@pytest.mark.parametrize(
    "make",
    parameters.by_default(MODELS, nested, frozen_start, wide=MODELS),
)
def test_outputs_loss_gradients_and_state_equal_the_whole_model_s(make, counts):
    keras.utils.set_random_seed(0)
    model = make()
    blocks = len(Chain(model).blocks)
    counts = {min(stages, blocks) for stages in counts}
    assert transparency.error(model, *counts, rows=4, recompute=(False, True), halved=(False, True)) < 1e-6


@pytest.mark.parametrize("make", MODELS)
def test_a_cut_may_fall_between_any_two_blocks(make):
    model = make()
    chain = Chain(model)
    for end, name in enumerate((block.name for block in chain.blocks[:-1]), start=1):
        assert cut_points(chain.blocks, (name,)) == [end, len(chain.blocks)]
    assert chain.crossing(0) == list(range(len(model.inputs)))
    assert len(chain.crossing(len(chain.blocks))) == len(model.outputs)


def test_blocks_are_in_the_order_of_the_model_s_layers():
    model = u_net()
    assert [block.name for block in Chain(model).blocks] == [layer.name for layer in model.layers[1:]]


def test_a_skip_is_carried_through_every_stage_it_passes_and_counted():
    x = keras.Input((4,))
    long = L.Dense(4, name="long")(x)
    y = L.Dense(4, name="two")(L.Dense(4, name="one")(long))
    chain = Chain(keras.Model(x, L.Add()([long, y])))
    assert [len(chain.crossing(end)) for end in range(5)] == [1, 1, 2, 2, 1]
    measured = pipetrain.profile(chain.model, batch_size=8, verbose=False, budget_s=None)
    assert [block.output_bytes for block in measured.blocks] == [4 * 8 * 4 * n for n in (1, 2, 2, 1)]


def test_frozen_layers_get_no_gradients():
    chain = Chain(frozen_start())
    assert [sum(chain.segment(end, end + 1).differentiable) for end in range(4)] == [0, 0, 0, 1]


def test_names_of_nested_layers():
    chain = Chain(siamese())
    names = [block.name for block in chain.blocks]
    assert names[0] == "encoder/first"
    assert cut_points(chain.blocks, ("encoder/first",))[0] == 1
    assert cut_points(chain.blocks, ("first",))[0] == 1
    assert cut_points(chain.blocks, ("encoder",))[0] == 5


def test_what_shares_weights_can_be_cut():
    assert [block.name for block in Chain(tied()).blocks] == ["embedding", "between", "tied", "end"]
    assert [len(block.calls) for block in Chain(a_layer_of_two_calls()).blocks] == [1, 1, 1, 1, 1]


def a_norm_of_two_calls():
    x, twice = keras.Input((8,)), L.BatchNormalization(name="twice")
    return keras.Model(x, twice(L.Dense(8, name="between")(twice(x))))


def test_what_shares_state_stays_together():
    assert [len(block.calls) for block in Chain(a_norm_of_two_calls()).blocks] == [3]
    with pytest.raises(ValueError, match=r"after 'between': 'twice' is called more than once.*Try 'twice:?2?'"):
        pipetrain.PipelineModel(a_norm_of_two_calls(), cuts=("between",), scheme="spectrain")
    with pytest.raises(ValueError, match=r"one stage \('twice' is called more than once.*stages=2\. Try stages=1"):
        pipetrain.PipelineModel(a_norm_of_two_calls(), stages=2, scheme="spectrain")


class Backbone(keras.Model):
    """A subclass of Functional that keeps its ``call``, on a dictionary."""

    def __init__(self):
        inputs = {"ids": keras.Input((6,), dtype="int32"), "mask": keras.Input((6,))}
        x = L.Embedding(9, 8, name="ids")(inputs["ids"]) * inputs["mask"][..., None]
        super().__init__(inputs, {"all": L.Dense(8, name="inner")(x)}, name="backbone")


class Task(keras.Model):
    """A subclass of Functional around a backbone, as task models are."""

    def __init__(self, **settings):
        backbone = Backbone()
        pooled = backbone(backbone.input, **settings)["all"][:, 0]
        super().__init__(backbone.input, L.Dense(3, name="logits")(pooled), name="task")


@pytest.mark.wide
@pytest.mark.parametrize("settings", [{}, {"mask": {"ids": None, "mask": None}}, {"training": True}])
def test_nested_models_are_opened_however_they_are_called(settings):
    task = Task(**settings)
    names = [block.name for block in Chain(task).blocks]
    assert {"backbone/inner", "logits"} <= {*names} and len(names) > 4
    assert transparency.error(task, 2, 4) < 1e-6


def test_nested_models_are_opened_by_the_name_of_their_argument():
    x, inner = keras.Input((8,)), keras.Sequential([keras.Input((8,)), L.Dense(4), L.Dense(3)], name="inner")
    assert len(Chain(keras.Model(x, inner(inputs=x))).blocks) == 2


@pytest.mark.wide
@pytest.mark.parametrize(
    ("weighted", "recompute"),
    [(False, False), pytest.param(True, True, marks=pytest.mark.slow)],  # 30 s; each by itself in other tests
)
def test_dictionaries_masks_and_several_losses_train_as_in_plain_keras(weighted, recompute):
    x, y = tokens_and_numbers()  # 150 rows: a short last batch
    weights = {"kind": np.linspace(0, 1, 150), "size": np.linspace(1, 0, 150)} if weighted else None
    keras.utils.set_random_seed(0)
    plain = compiled(many_inputs_and_outputs())
    model = keras.models.clone_model(plain)
    names = [block.name for block in Chain(model).blocks]
    cuts = (names[0], names[4])
    pm = pipetrain.PipelineModel(model, cuts=cuts, scheme="gpipe", microbatches=1, recompute=recompute)
    pm.set_weights(plain.get_weights())
    compiled(pm)
    settings = {"sample_weight": weights, "batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0}
    expected, history = plain.fit(x, y, **settings).history, pm.fit(x, y, **settings).history
    networks.assert_close(pm.get_weights(), plain.get_weights())
    assert networks.without_figures(history).keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, err_msg=key)
    np.testing.assert_allclose(list(pm.evaluate(x, y, verbose=0)), list(plain.evaluate(x, y, verbose=0)), rtol=1e-5)


@pytest.mark.wide
def test_a_mask_reaches_a_loss_and_a_metric_stages_later():
    def tagger():
        keras.utils.set_random_seed(0)
        x = keras.Input((6,), dtype="int32")
        y = L.Dense(7, activation="relu", name="middle")(L.Embedding(9, 5, mask_zero=True, name="embedding")(x))
        return keras.Model(x, L.Dense(3, name="end")(y))

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 3, (64, 6)), rng.integers(0, 3, (64, 6))
    plain, pm = tagger(), pipetrain.PipelineModel(tagger(), cuts=("embedding", "middle"), scheme="1f1b", microbatches=1)
    histories = []
    for model in (plain, pm):
        model.compile(keras.optimizers.SGD(0.1), networks.crossentropy(), metrics=["accuracy"])
        histories.append(model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history)
    networks.assert_close(pm.get_weights(), plain.get_weights())
    np.testing.assert_allclose(histories[1]["accuracy"], histories[0]["accuracy"], rtol=1e-5)
    np.testing.assert_allclose(histories[1]["loss"], histories[0]["loss"], rtol=1e-5)


def masking():
    return [keras.Input((6, 4)), L.Masking(name="mask"), L.Dense(5, name="a"), L.GlobalAveragePooling1D()]


def masked_words():
    words = L.Embedding(9, 5, mask_zero=True, name="words")
    return [keras.Input((6,), dtype="int32"), words, L.SimpleRNN(5, return_sequences=True), L.GlobalAveragePooling1D()]


def two_masks():
    return [keras.Input((6, 4)), L.Masking(name="one"), L.Dropout(0.0), L.Masking(2.0), L.SimpleRNN(4)]


@pytest.mark.wide
@pytest.mark.parametrize("layers", [masking, masked_words, two_masks])
def test_sequential_models_pass_masks_as_functional_ones_do(layers):
    def model(functional):
        keras.utils.set_random_seed(0)
        first, *others = [*layers(), L.Dense(3, name="end")]
        if not functional:
            return keras.Sequential([first, *others])
        x = first
        for layer in others:
            x = layer(x)
        return keras.Model(first, x)

    rng = np.random.default_rng(0)
    words = layers is masked_words
    x, y = rng.integers(0, 3, (64, 6) if words else (64, 6, 4)), rng.integers(0, 3, 64)
    x = x if words else x * (x.sum(-1, keepdims=True) > 2).astype("float32")

    built = model(False)
    blocks = Chain(built).blocks
    pm = pipetrain.PipelineModel(built, cuts=(blocks[0].name, blocks[3].name), scheme="1f1b", microbatches=2)
    plain = model(True)
    for each in (plain, pm):
        each.compile(keras.optimizers.SGD(0.1), networks.crossentropy())
        each.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    networks.assert_close(pm.get_weights(), plain.get_weights())


@pytest.mark.wide
@pytest.mark.parametrize(
    "scheme",
    parameters.by_default(["vanilla", "weight-stashing", "vertical-sync", "spectrain", "1f1b"], "spectrain"),
)
def test_recomputation_changes_no_weight(scheme):
    def trained(recompute):
        keras.utils.set_random_seed(0)
        pm = pipetrain.PipelineModel(
            skips(), stages=4, scheme=scheme, recompute=recompute, microbatches=2 if scheme == "1f1b" else None
        )
        pm.compile(keras.optimizers.SGD(0.02, momentum=0.9), networks.crossentropy())
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(400, 8)).astype("float32"), rng.integers(0, 3, 400)
        pm.fit(x, y, batch_size=20, shuffle=False, verbose=0)
        return pm.get_weights()

    networks.assert_equal(trained(True), trained(False))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "policy"), parameters.combinations(["spectrain", "1f1b"], ["mixed_bfloat16", "bfloat16"])
)
def test_half_precision_trains(policy, scheme):
    keras.utils.set_random_seed(0)
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = keras.Sequential(
            [keras.Input((12,)), *(L.Dense(16, activation="tanh") for _ in range(3)), L.Dense(5, dtype="float32")]
        )
        pm = pipetrain.PipelineModel(model, stages=3, scheme=scheme)
    finally:
        keras.config.set_dtype_policy(previous)
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy(), metrics=["accuracy"])
    history = pm.fit(*networks.data(400), batch_size=16, epochs=3, verbose=0).history
    assert history["accuracy"][-1] > history["accuracy"][0]
    assert history["accuracy"][-1] > 0.6


def test_float16_is_refused_by_name_in_asynchronous_schemes():
    layer = L.Dense(4, dtype="mixed_float16", name="narrow")
    with pytest.raises(ValueError, match=r"loss scaling.*'narrow'.*mixed_float16.*mixed_bfloat16"):
        pipetrain.PipelineModel(keras.Sequential([keras.Input((3,)), layer, L.Dense(2)]), stages=2, scheme="spectrain")


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["vanilla", "gpipe"])
def test_embedding_rows_update_as_in_plain_keras(scheme):
    def model():
        keras.utils.set_random_seed(0)
        x = keras.Input((4,), dtype="int32")
        return keras.Model(x, L.Dense(2)(L.Dense(3)(L.Flatten()(L.Embedding(50, 3)(x)))))

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, (64, 4)), rng.integers(0, 2, 64)
    plain, pm = model(), pipetrain.PipelineModel(model(), stages=1 if scheme == "vanilla" else 3, scheme=scheme)
    for each in (plain, pm):
        each.compile(keras.optimizers.SGD(0.1), networks.crossentropy())
        each.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    networks.assert_close(pm.get_weights(), plain.get_weights())


def test_a_recurrent_backward_reads_its_own_kernel():
    """The input gradient through a SimpleRNN takes backward's kernels with the activations that forward stored."""
    from pipetrain.compute.functions.split import specs, split

    x = keras.Input((3, 2))
    segment = Chain(keras.Model(x, L.SimpleRNN(4)(x))).segment(0, 1)
    state = [tf.convert_to_tensor(variable.value) for variable in segment.non_trainable_variables]
    rng = np.random.default_rng(0)
    shapes = [(2, 4), (4, 4), (4,)]
    old, new = ([tf.constant(rng.normal(size=shape), "float32") for shape in shapes] for _ in range(2))
    data = tf.constant(rng.normal(size=(1, 3, 2)), "float32")

    def run(weights, state, flows, constants):
        outputs, _ = segment.stateless_call(weights, state, flows, training=True)
        return outputs, outputs[0]

    step = split(run, specs(old), specs(state), specs([data]), [])
    _, residuals = step.forward(old, state, [data], [])
    _, (got,) = step.backward(new, residuals, [], [tf.ones((1, 4))])
    h, hidden = np.zeros((1, 4)), []
    for t in range(3):
        h = np.tanh(data[:, t] @ old[0] + h @ old[1] + old[2])
        hidden.append(h)
    dh, expected = np.ones((1, 4)), np.zeros((1, 3, 2))
    for t in reversed(range(3)):
        dz = dh * (1 - hidden[t] ** 2)
        expected[:, t], dh = dz @ new[0].numpy().T, dz @ new[1].numpy().T
    np.testing.assert_allclose(got, expected, atol=1e-5)


EVERY = [name for name in dir(keras.applications) if name[0].isupper() and callable(getattr(keras.applications, name))]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", EVERY)
def test_every_keras_application(name):
    """In 2, 3 and 4 stages, each in a process of its own.

    Without oneDNN, which computes a normalization and its neighbour in one kernel where it sees both: a last bit that
    differs in the first layers is a thousand times as large in the deepest networks' gradients.
    """
    command = [sys.executable, transparency.__file__, name, "2", "3", "4"]
    ran = subprocess.run(command, env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    print(name, ran.stdout)
    assert float(ran.stdout.split()[-1]) < 1e-4


@pytest.mark.wide
def test_a_keras_application():
    assert transparency.error_of_application("MobileNet", 3) < 1e-4  # of the smaller ones; the others are slow


@pytest.mark.wide
def test_dictionaries_of_inputs_go_by_keys_not_by_layers_names():
    a, b = keras.Input((2,), name="b"), keras.Input((2,), name="a")  # named after each other's key
    model = keras.Model({"a": a, "b": b}, L.Dense(1)(L.Concatenate()([a, 2 * b])))
    x, y = {"a": normal(16, 2), "b": 3 + normal(16, 2)}, normal(16, 1)
    pm = pipetrain.PipelineModel(keras.models.clone_model(model), stages=2, scheme="1f1b", microbatches=1)
    pm.set_weights(model.get_weights())
    losses = []
    for each in (model, pm):
        each.compile(keras.optimizers.SGD(0.01), "mse")
        losses.append(fit(each, x, y, batch_size=8).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    with pytest.raises(ValueError, match=r"missing: \['b'\].*Received: x with \['a', 'c'\]"):
        fit(pm, {"a": x["a"], "c": x["b"]}, y)


class Quiet(L.Layer):
    """Inner layers that behave otherwise in training, of which ``call`` does not know."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.normal, self.drop = L.BatchNormalization(momentum=0.5), L.Dropout(0.5, seed=3)

    def call(self, x):
        return self.drop(self.normal(x))


@pytest.mark.wide
def test_training_reaches_layers_inside_layers():
    networks.assert_layer_trains_as_in_plain_keras(Quiet)


class Positions(L.Layer):
    """Adds to each word's vector one that is learnt for its place."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="uniform", name="table")

    def call(self, x):
        return x + keras.ops.take(self.table, keras.ops.arange(x.shape[1]), axis=0)


@pytest.mark.wide
@pytest.mark.parametrize(
    "settings", [*parameters.rarely(({"microbatches": 4},)), {"microbatches": 2, "replicas": (3, 1)}]
)
def test_sparse_gradients_are_summed_over_microbatches_and_replicas_before_the_update(settings):
    """Adam squared the gradient of each microbatch, and each replica, for itself."""

    def model():
        keras.utils.set_random_seed(0)
        layers = [L.Embedding(7, 4), Positions(name="positions"), L.Flatten(), L.Dense(3)]
        return keras.Sequential([keras.Input((5,), dtype="int32"), *layers])

    x, y = np.random.default_rng(0).integers(0, 7, (40, 5)), np.arange(40) % 3
    plain, pm = model(), pipetrain.PipelineModel(model(), cuts=("positions",), scheme="gpipe", **settings)
    for each in (plain, pm):
        each.compile(keras.optimizers.Adam(0.01), networks.crossentropy())
        fit(each, x, y)
    networks.assert_close(pm.get_weights(), plain.get_weights())
