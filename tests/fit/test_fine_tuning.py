"""Low-rank adapters over frozen weights: they train by every scheme's rule, and frozen weights exist once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import reference
from keras import layers as L

import pipetrain
from pipetrain.compute.functions.weight_binding import Newest
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.profiling.kinds import cost_key

RANK, WORDS, LENGTH, WIDTH = 2, 30, 6, 8


def adapt(layer, rank=RANK):
    """LoRA adapters on a layer, whose other weights are frozen, with values in which every gradient shows."""
    layer.trainable = True
    layer.enable_lora(rank)
    adapters = {id(weight) for weight in layer.trainable_weights if "lora" in weight.name}
    assert len(adapters) == 2
    for weight in layer.trainable_weights:
        if id(weight) in adapters:
            weight.assign(0.3 * np.random.default_rng(len(weight.shape)).normal(size=weight.shape))
        else:
            weight.trainable = False


def adapt_attention(attention):
    """Adapters on queries and values, as keras_hub has them: all else is frozen, the layer around them too."""
    attention.trainable = False
    for part in (attention.query_dense, attention.value_dense):
        adapt(part)


def text_model(tuned=True):
    """Embeddings whose transpose is the output, frozen attention and normalization, and adapters in every place."""
    keras.utils.set_random_seed(0)
    words = keras.Input((LENGTH,), dtype="int32")
    embedding = L.ReversibleEmbedding(WORDS, WIDTH, name="embedding")
    h = embedding(words)
    attention = L.MultiHeadAttention(2, 4, name="attention")
    h = L.Add(name="sum")([h, attention(h, h)])
    h = L.BatchNormalization(name="normalization")(h)
    wide = L.Dense(12, "tanh", name="wide")
    h = L.Dense(WIDTH, "tanh", name="narrow")(wide(h))
    h = L.Dense(WIDTH, "tanh", name="trained")(h)
    model = keras.Model(words, embedding(h, reverse=True))
    if tuned:
        for layer in model.layers:
            layer.trainable = layer.name == "trained"
        for layer in (embedding, wide):
            adapt(layer)
        adapt_attention(attention)
    return model


def sentences(rows=60):
    words = np.random.default_rng(0).integers(0, WORDS, (rows, LENGTH + 1)).astype("int32")
    return words[:, :-1], words[:, 1:]


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}


def trained(optimizer="momentum", **settings):
    """A text model after two epochs, and what it was compiled as."""
    model = text_model()
    pm = networks.in_way(model, **settings) if settings else model
    pm.compile(OPTIMIZERS[optimizer](), networks.crossentropy())
    networks.fit(pm, *sentences(), epochs=2)
    return pm


@cache
def plain_keras(optimizer):
    return trained(optimizer).get_weights()


def assert_frozen_stay_and_others_train(model, after):
    before = text_model()
    trains = {id(weight) for weight in before.trainable_weights}
    for weight, new in zip(before.weights, after, strict=True):
        assert np.array_equal(weight, new) == (id(weight) not in trains), weight.path


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "optimizer", "recompute"),
    parameters.combinations(
        ["1f1b", "gpipe"],
        list(OPTIMIZERS),
        [False, True],
        default=[("gpipe", "adamw", True)],
    ),
)
def test_synchronous_schemes_train_as_plain_keras(scheme, optimizer, recompute):
    cuts = ("embedding", "sum", "narrow")
    pm = trained(optimizer, cuts=cuts, scheme=scheme, microbatches=2, recompute=recompute)
    networks.assert_close(pm.get_weights(), plain_keras(optimizer))
    assert_frozen_stay_and_others_train(pm, pm.get_weights())


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["1f1b", "weight-stashing"])
def test_adapters_inside_a_frozen_layer_are_reached_from_later_stages(scheme):
    """Such a layer lists no trained weights, and no other weight of its stage is trained."""
    weights = []
    for pipelined in (False, True):
        keras.utils.set_random_seed(0)
        x = keras.Input((LENGTH, WIDTH))
        attention = L.MultiHeadAttention(2, 4, name="attention")
        model = keras.Model(x, L.Dense(WIDTH, name="head")(attention(x, x)))
        adapt_attention(attention)
        assert not attention.trainable_weights and len(model.trainable_weights) == 6
        before = model.get_weights()
        pm = pipetrain.PipelineModel(model, cuts=("attention",), scheme=scheme) if pipelined else model
        pm.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse")
        networks.fit(pm, networks.normal(40, LENGTH, WIDTH), networks.normal(40, LENGTH, WIDTH))
        for weight, old in zip(model.weights, before):
            assert np.array_equal(weight, old) != weight.trainable, weight.path
        weights.append(model.get_weights())
    if scheme == "1f1b":
        networks.assert_close(weights[1], weights[0])


class LowRank(reference.State):
    """Of each dense layer a pair (A, B) is trained: it applies ``kernel + A B`` and a frozen bias."""

    def __init__(self, model):
        super().__init__([(np.array(each.lora_kernel_a), np.array(each.lora_kernel_b)) for each in model.layers])
        self.frozen = [(np.array(each._kernel), np.array(each.bias)) for each in model.layers]

    def applied(self, layer, pair):
        kernel, bias = self.frozen[layer]
        return [kernel + pair[0] @ pair[1], bias]

    def of_pair(self, layer, pair, kernel, bias):
        return [kernel @ pair[1].T, pair[0].T @ kernel]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "optimizer"),
    parameters.combinations(
        ["vanilla", "weight-stashing", "spectrain", "local", "vertical-sync", "2bw"],
        ["momentum", "adamw"],
        default=[("weight-stashing", "momentum"), ("spectrain", "adamw")],
    ),
)
def test_adapters_follow_the_schemes_rules(scheme, optimizer):
    """Also in the backward, whose kernel is made of the adapters that it is to read, not of the forward's."""
    model, (x, y) = networks.mlp(), networks.data(rows=320)
    for layer in model.layers:
        adapt(layer)
    state = LowRank(model)
    rule, rate = {"momentum": (reference.Sgd(), 0.05), "adamw": (reference.Adam(decay=0.1), 0.01)}[optimizer]
    options = {"scheme": "spectrain", "horizon": "local"} if scheme == "local" else {"scheme": scheme}
    pm = networks.pipeline(model, OPTIMIZERS[optimizer](), cuts=networks.cuts(6, 4), **options)
    pm.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    batches = [(x[first : first + 16], y[first : first + 16]) for first in range(0, len(x), 16)]
    reference.train(reference.Settings(scheme, lambda t: rate, rule), state, networks.ends(6, 4), batches)
    networks.assert_close(model.trainable_variables, [array for layer in state.layers for array in layer])


def stages_of(pm):
    return [replicas[0] for replicas in inside.replicas(pm)]


@pytest.mark.wide
@pytest.mark.parametrize(
    "scheme", parameters.by_default(["vanilla", "weight-stashing", "vertical-sync", "spectrain", "2bw"], "spectrain")
)
def test_frozen_weights_have_no_gradients_slots_versions_or_predictions(scheme):
    pm = trained(cuts=("embedding", "sum", "narrow"), scheme=scheme)
    names = {weight.path for weight in pm.trainable_weights}
    assert len(pm.optimizer.variables) == 2 + len(names)
    found = set()
    for stage in stages_of(pm):
        mine = {weight.path for weight in stage.segment.trainable_variables}
        found |= mine
        assert {slot.weight.path for slot in stage.slots()} == mine
        assert len(stage.variables) == len(stage._backward.like) == len(mine)
        assert all(gradient is not None for gradient in stage._backward.like)
        frozen = [weight for weight in stage.segment.non_trainable_variables if "seed" not in weight.path]
        assert frozen
        for group in stage._groups.all:  # what is kept as an old version, and what is predicted
            for horizon in (0, 1) if scheme == "spectrain" else (0,):
                shapes = [tuple(value.shape) for value in group.weights(Newest(horizon))]
                assert shapes == [tuple(weight.shape) for weight in group.originals]
    assert found == names
    assert_frozen_stay_and_others_train(pm, pm.get_weights())


def wide_model(tuned):
    """Eight wide layers, with adapters if ``tuned``; then a narrow one, which is trained."""
    keras.utils.set_random_seed(0)
    layers = [L.Dense(64, "tanh", name=f"d{n}") for n in range(8)]
    model = keras.Sequential([keras.Input((64,)), *layers, L.Dense(4, name="head")])
    for layer in layers if tuned else ():
        adapt(layer, 1)
    return model


@pytest.mark.wide
def test_the_plan_counts_frozen_weights_once():
    """All that old versions, slots and gradients add goes by the weights that are trained."""
    model = wide_model(True)
    profile = pipetrain.profile(model, 2, verbose=False, budget_s=None)
    kernel = 64 * 64 * 4
    for block in profile.blocks[:8]:
        assert (block.weight_bytes, block.fixed_bytes) == (2 * 64 * 4, kernel + 64 * 4)
        assert block.activation_bytes < kernel  # the kernel with the adapters' product is not kept, but made again
    trains = sum(np.prod(weight.shape) for weight in model.trainable_weights) * 4
    planned = {
        scheme: sum(
            stage.memory_bytes
            for stage in pipetrain.PipelineModel(model, cuts=("d1", "d3", "d5"), scheme=scheme).partition(2).stages
        )
        for scheme in ("vanilla", "weight-stashing", "vertical-sync", "spectrain")
    }
    frozen = 8 * (kernel + 64 * 4)
    for bytes_planned in planned.values():
        assert frozen < bytes_planned < 2 * frozen  # with the gradient of one kernel, which the adapters' are made of
        assert abs(bytes_planned - planned["vanilla"]) <= 4 * trains  # at most four versions


@pytest.mark.wide
def test_equal_layers_of_which_one_is_tuned_have_different_costs():
    """Adapters inside a layer are not among the settings that Keras writes down."""

    x = keras.Input((LENGTH, WIDTH))
    first, second = (L.MultiHeadAttention(2, 4, name=name) for name in ("first", "second"))
    y = L.Dense(WIDTH, name="dense")(x)
    y = first(y, y)
    model = keras.Model(x, second(y, y))
    _, *attentions = Chain(model).blocks
    same = {cost_key(block) for block in attentions}
    adapt_attention(second)
    assert len(same) == 1 < len(same | {cost_key(block) for block in Chain(model).blocks[1:]})
    _, plain, tuned = pipetrain.profile(model, 4, verbose=False, budget_s=None).blocks
    assert (plain.weight_bytes, plain.fixed_bytes) == (4 * first.count_params(), 0)
    adapters = 4 * sum(np.prod(weight.shape) for weight in second.weights if weight.trainable)
    assert (tuned.weight_bytes, tuned.fixed_bytes) == (adapters, plain.weight_bytes)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(["1f1b", "spectrain", "single"], "1f1b"))
def test_a_pipeline_that_has_trained_is_fine_tuned(scheme):
    """Frozen, adapted and compiled again, it goes on as plain Keras does."""
    results = []
    for pipelined in (False, True):
        model = networks.mlp(3)
        cuts = networks.parts(scheme, "d0", "d1")
        pm = pipetrain.PipelineModel(model, scheme=scheme, **cuts) if pipelined else model
        pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
        networks.fit(pm, *networks.data(120))
        before = model.get_weights()
        for layer in model.layers[:2]:
            adapt(layer)
        pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
        networks.fit(pm, *networks.data(120))
        assert np.array_equal(model.layers[0]._kernel, before[0])
        assert not np.array_equal(model.layers[2].kernel, before[4])
        results.append(pm.get_weights())
    if scheme != "spectrain":
        networks.assert_close(results[1], results[0])


@pytest.mark.wide
def test_data_parallelism_trains_adapters_that_come_after_it():
    """It trains the model itself, whatever it has by then."""
    results = []
    for wrap in (lambda model: model, lambda model: pipetrain.PipelineModel(model, stages=2, scheme="data-parallel")):
        keras.utils.set_random_seed(0)
        trained = wrap(model := networks.mlp(3))
        adapt(model.layers[0])
        trained.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
        networks.fit(trained, *networks.data(40))
        results.append(model.get_weights())
    networks.assert_close(*results)


def peaks(scheme, trains):
    """The peaks of ``frozen_memory.py``, and the bytes of all weights and of those that are trained."""
    script = Path(__file__).parents[1] / "frozen_memory.py"
    environment = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1"}
    command = [sys.executable, str(script), scheme, trains]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow  # 60 s; by default the plan's own figures are tested
def test_old_and_predicted_versions_are_of_the_adapters_alone():
    """Old versions of all weights are nine copies of a stage's; of adapters they are less than what varies."""
    found = {
        (scheme, trains): peaks(scheme, trains)
        for scheme in ("vanilla", "weight-stashing", "spectrain")
        for trains in ("all", "adapters")
    }
    least = {key: min(each["peaks"]) for key, each in found.items()}
    weights = found["vanilla", "all"]["weights"]
    assert found["vanilla", "adapters"]["trained"] < weights / 50
    assert least["weight-stashing", "all"] - least["vanilla", "all"] > 1.5 * weights
    assert least["vanilla", "all"] > 1.9 * weights  # the stages' copies and the momentum
    for scheme in ("vanilla", "weight-stashing", "spectrain"):
        assert least[scheme, "adapters"] < 0.6 * weights  # what few layers at work make of their kernels
        assert abs(least[scheme, "adapters"] - least["vanilla", "adapters"]) < 0.2 * weights
