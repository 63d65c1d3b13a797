"""Weights that several stages have: every scheme against the reference or plain Keras, and equal copies."""

from __future__ import annotations

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import reference
from keras import layers as L
from keras import optimizers

import pipetrain
from pipetrain.compute.graph.blocks import Chain
from pipetrain.schemes.actions import Action
from pipetrain.schemes.policies import FlushPolicy, Read, VanillaPolicy
from pipetrain.schemes.schedules import Schedule
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import ASYNCHRONOUS as ASYNCHRONOUS_SCHEDULE

ASYNCHRONOUS = (
    "vanilla",
    "weight-stashing",
    "vertical-sync",
    "spectrain",
    "local",
    "fitted",
    "spike-compensation",
    "2bw",
)
BATCH = 16
SHARED = {2: 3, 3: 2, 4: 3, 6: 3}  # weights of ``tied_autoencoder`` that several stages have, in so many stages


def breadth_first(device, devices, groups):
    """Two stages a device: all forwards of a minibatch, stage by stage, then all backwards."""
    for group in groups:
        for op, stages in (("F", (device, device + devices)), ("B", (device + devices, device))):
            yield from (Action(op, stage, microbatch) for stage in stages for microbatch in group)


BREADTH_FIRST = Scheme("breadth-first", Schedule(breadth_first, chunks=2), FlushPolicy(), splits=True)


def data(rows=28 * BATCH):
    """Which of its features is the largest."""
    x, _ = networks.data(rows=rows)
    return x, x.argmax(axis=1).astype("int32")


def copies(pm):
    """Every copy of every trained weight, by the model's own."""
    found = {}
    for replicas in inside.replicas(pm):
        for stage in replicas:
            for weight, copy in zip(stage.segment.trainable_variables, stage.variables):
                found.setdefault(weight.path, []).append(copy.numpy())
    return found


def assert_equal_copies(pm, shared):
    """All holders have bitwise the model's weights; that many weights have several."""
    found, own = copies(pm), {each.path: each.numpy() for each in pm.model.trainable_variables}
    assert sum(len(each) > 1 for each in found.values()) == shared
    for path, values in found.items():
        for value in values:
            np.testing.assert_array_equal(value, own[path])


def fit(pm, x, y):
    pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


def compare(settings, stages, optimizer, **options):
    """Two fits, a drain between them, against the reference."""
    x, y = data(24 * BATCH)
    model = networks.tied_autoencoder()
    state = reference.State(networks.tied_layers(model), networks.TIED)
    settings, options = reference.chosen(settings, stages, options)
    pm = networks.pipeline(model, optimizer, cuts=networks.cuts(6, stages), **options)
    for _ in range(2):
        fit(pm, x, y)
        batches = [(x[n : n + BATCH], y[n : n + BATCH]) for n in range(0, len(x), BATCH)]
        reference.train(settings, state, networks.ends(6, stages), batches)
        for (kernel, bias), (wanted, wanted_bias) in zip(networks.tied_layers(model), state.layers, strict=True):
            networks.assert_close([bias], [wanted_bias])
            if kernel is not None:
                networks.assert_close([kernel], [wanted])
        assert_equal_copies(pm, SHARED[stages])


@pytest.mark.parametrize(
    ("scheme", "stages"),
    parameters.combinations(
        ASYNCHRONOUS,
        (2, 3, 4, 6),
        default=[],
        wide=[("spectrain", 3), ("vertical-sync", 4), ("2bw", 4), ("spectrain", 6)],
    ),
)
def test_asynchronous_schemes_equal_the_reference(scheme, stages):
    settings = reference.Settings(scheme, lambda t: 0.05)
    compare(settings, stages, optimizers.SGD(0.05, momentum=0.9))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("stages", "microbatches"),
    parameters.combinations((2, 3, 4, 6), (1, 2, 5), default=[(4, 5)]),
)
def test_one_target_equals_the_reference(stages, microbatches):
    settings = reference.Settings("target", lambda t: 0.05, microbatches=microbatches)
    compare(settings, stages, optimizers.SGD(0.05, momentum=0.9))


@pytest.mark.wide
@pytest.mark.parametrize("stages", parameters.by_default([2, 3, 4, 6], 4))
def test_two_predicted_versions_equal_the_reference(stages):
    settings = reference.Settings("2bw", lambda t: 0.05, horizon=1.5)
    compare(settings, stages, optimizers.SGD(0.05, momentum=0.9))


class OwnVanilla(VanillaPolicy):
    """Says which version the backward reads as a policy says it that knows nothing of shared weights."""

    def backward(self, reader):
        return Read(reader.minibatch)


@pytest.mark.wide
def test_policies_that_know_nothing_of_shared_weights_read_the_newest_copies():
    own = Scheme("own", ASYNCHRONOUS_SCHEDULE, OwnVanilla())
    compare(reference.Settings("vanilla", lambda t: 0.05), 4, optimizers.SGD(0.05, momentum=0.9), scheme=own)


@pytest.mark.wide
@pytest.mark.parametrize("jit_compile", [True])
def test_compiled_stages_equal_the_reference(jit_compile):
    settings = reference.Settings("spectrain", lambda t: 0.05)
    compare(settings, 3, optimizers.SGD(0.05, momentum=0.9), jit_compile=jit_compile)


@pytest.mark.wide
def test_a_schedule_decay_and_adam():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([7, 35], [2e-3, 1e-3, 4e-3])
    settings = reference.Settings("spectrain", lambda t: float(schedule(t)), reference.Adam(decay=0.1))
    compare(settings, 4, optimizers.AdamW(schedule, weight_decay=0.1))


@pytest.mark.wide
def test_corrections_for_staleness_are_those_of_the_first_stage():
    settings = reference.Settings("weight-stashing", lambda t: 0.02, reference.Sgd(), True, 40)
    optimizer = optimizers.SGD(0.02, momentum=0.9)
    compare(settings, 4, optimizer, spike_compensation=True, rescale_steps=40)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(["spectrain", "weight-stashing"], "weight-stashing"))
def test_forwards_run_again_read_the_same_weights(scheme):
    compare(reference.Settings(scheme, lambda t: 0.05), 4, optimizers.SGD(0.05, momentum=0.9), recompute=True)


SYNCHRONOUS = [
    ("1f1b", 2, 4, None),
    *parameters.widely(("1f1b", 4, 1, 0.1), (BREADTH_FIRST, 6, 4, None)),
]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "stages", "microbatches", "clipnorm"),
    [
        *SYNCHRONOUS,
        *parameters.combinations(("1f1b", "gpipe"), (2, 3, 4, 6), (1, 4), (None, 0.1), default=[]),
        *parameters.rarely(("gpipe", 6, 3, None), ("single", 1, None, None)),
    ],
)
def test_synchronous_schemes_equal_plain_keras(scheme, stages, microbatches, clipnorm):
    """Two fits; the last minibatch of each is a short one."""
    x, y = data(28 * BATCH + 8)
    settings = {"learning_rate": 0.05, "momentum": 0.9, "global_clipnorm": clipnorm}
    plain, model = networks.tied_autoencoder(), networks.tied_autoencoder()
    plain.compile(optimizers.SGD(**settings), loss=networks.crossentropy())
    parts = {"cuts": networks.cuts(6, stages), "microbatches": microbatches} if stages > 1 else {}
    pm = networks.pipeline(model, optimizers.SGD(**settings), scheme=scheme, **parts)
    for first in (0, BATCH):
        fit(plain, x[first:], y[first:])
        fit(pm, x[first:], y[first:])
        networks.assert_close(model.get_weights(), plain.get_weights())
        if stages > 1:
            assert_equal_copies(pm, SHARED[stages])


def test_a_weight_of_two_stages_is_trained_by_the_gradients_of_both_and_by_one_penalty():
    x, results = networks.normal(24, 4), []
    for parts in (None, {"scheme": "1f1b", "cuts": ("between",), "microbatches": 1}):
        networks.draw_from(0)
        inputs, shared = keras.Input((4,)), L.Dense(4, kernel_regularizer="l2", bias_regularizer="l2", name="shared")
        model = keras.Model(inputs, shared(L.Activation("tanh", name="between")(shared(inputs))))
        trained = networks.in_way(model, **parts) if parts else model
        trained.compile(optimizers.SGD(0.05), "mse")
        losses = networks.fit(trained, x, x, batch_size=8).history["loss"]
        results.append([*model.get_weights(), np.array(losses)])
    networks.assert_close(*results)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(["spectrain", "1f1b"], "1f1b"))
def test_replicas(scheme):
    """Two replicas of the first and of the last stage: the weights of one each, and equal copies."""
    x, y = data(10 * BATCH)
    trained = []
    for replicas in ((1, 1, 1), (2, 1, 2)):
        model = networks.tied_autoencoder()
        pm = networks.pipeline(model, scheme=scheme, cuts=networks.cuts(6, 3), replicas=replicas)
        fit(pm, x, y)
        assert_equal_copies(pm, 2 if replicas == (1, 1, 1) else 6)
        trained.append(model.get_weights())
    networks.assert_close(*trained)


def language_model(tied=True, regularizer=None):
    """An embedding whose transpose is the output layer, as language models have it."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((7,), dtype="int32")
    embedding = L.ReversibleEmbedding(11, 6, tie_weights=tied, embeddings_regularizer=regularizer, name="embedding")
    y = embedding(tokens)
    for n in range(3):
        y = L.Dense(6, activation="tanh", name=f"d{n}")(y)
    return keras.Model(tokens, embedding(y, reverse=True))


PIPELINE = {"scheme": "1f1b", "stages": 4, "microbatches": 2}
COPIES = {"scheme": "data-parallel", "devices": ("CPU:0", "CPU:1")}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (optimizers.Adam, PIPELINE),
        *parameters.rarely((optimizers.SGD, PIPELINE), (optimizers.Adam, COPIES)),
    ],
)
def test_rows_of_an_embedding_and_a_dense_gradient_are_one_sum(optimizer, settings):
    """With a regularizer, which counts once."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 11, (70, 7)), rng.integers(0, 11, (70, 7))
    plain, model = (language_model(regularizer=keras.regularizers.L2(0.05)) for _ in range(2))
    plain.compile(optimizer(0.05), loss=networks.crossentropy())
    history = plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history["loss"]
    pm = networks.pipeline(model, optimizer(0.05), **settings)
    assert pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history["loss"] == pytest.approx(history, 1e-5)
    networks.assert_close(model.get_weights(), plain.get_weights())
    if settings is PIPELINE:
        assert_equal_copies(pm, 1)
    assert pm.evaluate(x, y, verbose=0)[0] == pytest.approx(plain.evaluate(x, y, verbose=0), rel=1e-5)
    networks.assert_close([pm.predict(x, verbose=0)], [plain.predict(x, verbose=0)])


@pytest.mark.wide
def test_a_stage_has_only_the_weights_that_it_reads():
    """Two matrices of one layer, each read in one of its calls, and a bias beside a kernel that another layer reads."""
    model = language_model(tied=False)
    weights = [{each.name for each in call.weights} for block in Chain(model).blocks for call in block.calls]
    assert (weights[0], weights[-1]) == ({"embeddings"}, {"reverse_embeddings"})
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 11, (64, 7)), rng.integers(0, 11, (64, 7))
    pm = networks.pipeline(model, scheme="spectrain", stages=4)
    before = pm.get_weights()
    pm.fit(x, y, batch_size=BATCH, verbose=0)
    assert_equal_copies(pm, 0)
    assert all((old != new).any() for old, new in zip(before, pm.get_weights(), strict=True))


def siamese():
    """One embedding and one layer, called at two depths each: their gradients are rows and rows."""
    keras.utils.set_random_seed(0)
    a, b = keras.Input((3,), dtype="int32"), keras.Input((3,), dtype="int32")
    words, twice = L.Embedding(9, 4, name="words"), L.Dense(4, activation="tanh", name="twice")
    y = L.Flatten()(L.Dense(4, name="middle")(twice(words(a))))
    return keras.Model([a, b], L.Dense(3)(L.Concatenate()([y, L.Flatten()(twice(words(b)))])))


@pytest.mark.wide
def test_layers_called_at_several_depths():
    rng = np.random.default_rng(0)
    x, y = [rng.integers(0, 9, (70, 3)) for _ in range(2)], rng.integers(0, 3, 70)
    plain, model = siamese(), siamese()
    plain.compile(optimizers.Adam(0.02), loss=networks.crossentropy())
    plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    cuts = ("words", "words:2", "twice", "twice:2", "middle")
    pm = networks.pipeline(model, optimizers.Adam(0.02), scheme="gpipe", cuts=cuts, microbatches=1)
    pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    networks.assert_close(model.get_weights(), plain.get_weights())
    assert_equal_copies(pm, 3)


@pytest.mark.wide
def test_the_same_weights_whatever_the_timing():
    x, y = data()
    runs = []
    for _ in range(2):
        pm = networks.pipeline(networks.tied_autoencoder(), scheme="spectrain", cuts=networks.cuts(6, 4))
        fit(pm, x, y)
        runs.append(pm.get_weights())
    networks.assert_equal(*runs)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_an_interrupt_counts_the_steps_of_stages_that_have_only_shared_weights(microbatches):
    inputs, shared = keras.Input((4,)), L.Dense(4)
    model = keras.Model(inputs, shared(L.Activation("tanh", name="between")(shared(inputs))))
    pm = pipetrain.PipelineModel(model, cuts=("between",), scheme="1f1b", microbatches=microbatches)
    pm.compile(optimizers.SGD(1e-3), "mse")

    def stop(batch, logs):
        if batch == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        x = networks.normal(64, 4)
        networks.fit(pm, x, x, batch_size=8, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)])
    assert int(pm.optimizer.iterations) == 4
