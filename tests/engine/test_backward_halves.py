"""Backwards in halves, and several stages a device, train as the unsplit model does."""

from __future__ import annotations

import threading

import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
import transparency
from schedule_training import assert_as, compare, pipelined, plain_mlp, trained

import pipetrain
from pipetrain.compute.functions.backward import BackwardHalves
from pipetrain.compute.functions.stage_values import SEPARATE
from pipetrain.schemes import Schedule, Scheme
from pipetrain.schemes.dry_run import replay
from pipetrain.schemes.policies import FlushPolicy, VanillaPolicy
from pipetrain.schemes.schedules import asynchronous, gpipe, orders, unflushed
from pipetrain.schemes.table import CHUNKED, SCHEDULED
from pipetrain.schemes.text_form import written

HALVED = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min")
BY_DEFAULT = [
    ("zb-h1", 4, 4),
    ("zb-h2", 2, 8),
    ("zb-v", 4, 3),
    ("v-half", 2, 4),
    ("v-min", 2, 3),
    ("interleaved/3", 2, 4),
    ("looped-bfs/2", 2, 8),
]
CLIPPED = [("zb-h1", False), ("zb-v", True)]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "devices", "microbatches"),
    parameters.combinations(
        (*HALVED, *(f"{name}/{chunks}" for name in CHUNKED for chunks in (1, 2, 3))),
        (2, 4),
        (1, 3, 4, 8),
        default=BY_DEFAULT,
    ),
)
def test_every_schedule_equals_the_unsplit_model(scheme, devices, microbatches):
    """The last minibatch is short: 8 microbatches are then more than its rows."""
    name, _, chunks = scheme.partition("/")
    stages = devices * int(chunks or SCHEDULED[name].schedule.chunks)
    depth, rows = max(6, stages), 65
    pm = pipelined(networks.mlp(depth), scheme, devices, cuts=networks.cuts(depth, stages), microbatches=microbatches)
    assert_as(*plain_mlp(depth, rows), pm, trained(pm, networks.data(rows)))
    assert {span.op for span in pm.trace.spans} == ({"F", "I", "W"} if name in HALVED else {"F", "B"})
    assert pm.trace.rows == [(stage, 0) for stage in range(stages)]
    on = {span.stage: int(span.device[-1]) for span in pm.trace.spans}
    place = SCHEDULED[name].schedule.place
    assert [on[stage] for stage in range(stages)] == [place(stage, devices) for stage in range(stages)]


def recurrent():
    """Layers whose gradients are made in one operation or loop, which no half of a backward has alone."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((networks.FEATURES,)),
            layers.Reshape((4, 3)),
            layers.LSTM(6, return_sequences=True),
            layers.LayerNormalization(),
            layers.Dense(6, "tanh"),
            layers.Flatten(),
            layers.Dense(networks.CLASSES, kernel_regularizer="l2"),
        ]
    )


def attentive():
    """An embedding, attention with a skip, a layer's own penalty."""
    keras.utils.set_random_seed(4)
    layers, tokens = keras.layers, keras.Input((7,), dtype="int32")
    x = layers.Embedding(11, 8)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = x + layers.EinsumDense("abc,cd->abd", (7, 8), activation="relu", bias_axes="d")(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(5, activity_regularizer=keras.regularizers.L2(1e-3))(x))


def convolutional():
    keras.utils.set_random_seed(5)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.Conv2DTranspose(3, 2, activation="tanh"),
            layers.Flatten(),
            layers.Dense(5, kernel_regularizer="l2", use_bias=False),
        ]
    )


def rows_of(shape, classes=5, integers=0, rows=50):
    rng = np.random.default_rng(6)
    x = rng.integers(0, integers, (rows, *shape)) if integers else rng.normal(size=(rows, *shape)).astype("float32")
    return x, rng.integers(0, classes, rows).astype("int32")


MODELS = {
    "recurrent": (recurrent, lambda: networks.data(50)),
    "attentive": (attentive, lambda: rows_of((7,), integers=11)),
    "convolutional": (convolutional, lambda: rows_of((8, 8, 3))),
}
OPTIMIZERS = {
    "global_clipnorm": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.3),
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.1),
    "accumulation": lambda: keras.optimizers.AdamW(0.01, gradient_accumulation_steps=2),
}
GATHERED = [("zb-h1", "accumulation"), ("zb-v", "clipnorm")]  # shared weights have the norm of all gradients


@pytest.mark.wide
@pytest.mark.parametrize(("scheme", "name"), parameters.combinations(["zb-h1", "zb-v"], [*MODELS]))
def test_layers_of_all_kinds(scheme, name):
    make, data = MODELS[name]
    compare(make, scheme, 2, data(), microbatches=3)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "name"), parameters.combinations(["zb-h1", "zb-v"], [*OPTIMIZERS], default=GATHERED)
)
def test_optimizers_that_gather_gradients(scheme, name):
    compare(networks.mlp, scheme, 2, networks.data(110), optimizer=OPTIMIZERS[name], microbatches=4)


@pytest.mark.wide
@pytest.mark.parametrize("make", parameters.by_default([recurrent, convolutional], convolutional))
def test_stages_that_xla_compiles(make, recwarn):
    data = networks.data(50) if make is recurrent else rows_of((8, 8, 3))
    compare(make, "zb-v", 2, data, jit_compile=True, microbatches=3)
    assert not [each for each in recwarn if "XLA cannot" in str(each.message)]


@pytest.mark.wide
@pytest.mark.parametrize("settings", [{"recompute": True}, {"replicas": (2, 1)}], ids=str)
def test_recomputation_and_replicas(settings):
    devices = 3 if "replicas" in settings else 2
    places = tuple(f"CPU:{n}" for n in range(devices))
    x, y = networks.data(110)
    single = networks.mlp()
    pm = pipetrain.PipelineModel(networks.mlp(), 2, "zb-h1", devices=places, microbatches=4, **settings)
    for model in (single, pm):
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=networks.crossentropy())
        networks.fit(model, x, y, epochs=2)
    networks.assert_close(pm.get_weights(), single.get_weights())


@pytest.mark.wide
@pytest.mark.parametrize(("scheme", "clipped"), parameters.combinations([*SCHEDULED], [False, True], default=CLIPPED))
def test_shared_weights(scheme, clipped):
    """Copies of a weight may be on one device, of which either stage may be done with a minibatch first."""

    def optimizer():
        return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5 if clipped else None)

    x, _ = networks.data(110)
    data = x, x.argmax(axis=1).astype("int32")
    compare(networks.tied_autoencoder, scheme, 2, data, optimizer=optimizer, microbatches=3)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default([*SCHEDULED, "interleaved/3", "looped-bfs/3"], "zb-v"))
def test_the_same_seed_gives_the_same_weights_whatever_the_timing(scheme, monkeypatch):
    pm, results = pipelined(networks.mlp(depth=8), scheme, 2, microbatches=4), []
    pm.compile(keras.optimizers.Adam(0.01), loss=networks.crossentropy())
    first = pm.get_weights()
    for delays in (False, True):
        if delays:
            networks.delay(monkeypatch, 0.005, "forward", "backward", "input_gradients", "update")
        networks.begin_anew(pm, first)
        history = networks.fit(pm, *networks.data(110), epochs=2).history
        results.append((networks.without_figures(history), pm.get_weights()))
    assert results[0][0] == results[1][0]
    networks.assert_equal(results[0][1], results[1][1])


@pytest.mark.wide
def test_a_schedule_of_a_file_trains(tmp_path, monkeypatch):
    file = tmp_path / "mine.csv"
    file.write_text(written(replay(orders(SCHEDULED["v-half"].schedule.order, 2, 1, 3))), encoding="utf-8")
    pm = compare(networks.mlp, str(file), 2, networks.data(110), cuts=networks.cuts(6, 4))
    assert pm.scheme == "mine.csv"
    assert len({span.microbatch for span in pm.trace.spans}) % 3 == 0
    with pytest.raises(ValueError, match=r"for 2 devices and 3 microbatches. Received: 2 devices, microbatches=4"):
        pipelined(networks.mlp(), str(file), 2, cuts=networks.cuts(6, 4), microbatches=4)


def first_gradients(model, x, y):
    """The loss of a first step and the gradients that it went by, and the model's state after it."""
    before = [each.numpy() for each in model.trainable_variables]
    loss = model.train_on_batch(x, y)
    after = [each.numpy() for each in model.trainable_variables]
    state = [each.numpy() for each in model.non_trainable_variables]
    return [loss], [old - new for old, new in zip(before, after, strict=True)], state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "microbatches", "settings"),
    [
        ("MobileNet", 1, {"alpha": 0.25}),
        ("MobileNetV2", 1, {"alpha": 0.35}),
        ("EfficientNetB0", 1, {}),
        ("ResNet50", 1, {}),
        ("DenseNet121", 1, {}),
        ("VGG16", 4, {"include_top": False, "pooling": "avg"}),  # its dense layers would have 120 million weights
        ("ConvNeXtTiny", 4, {}),
    ],
)
def test_networks_of_keras_applications_under_zb_v(name, microbatches, settings):
    """Of those that normalize over a minibatch's rows, minibatches are not divided."""
    # Grappler regroups sums over the whole model, which a cut keeps it from: not what is looked for here.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        x, y = rows_of((32, 32, 3), rows=8)
        results = []
        for cut in (False, True):
            keras.utils.set_random_seed(0)
            make = getattr(keras.applications, name)
            top = {"classes": 5, "classifier_activation": None} if settings.get("include_top", True) else {}
            model = make(weights=None, input_shape=(32, 32, 3), **top, **settings)
            model = pipelined(model, "zb-v", 2, microbatches=microbatches) if cut else model
            model.compile(keras.optimizers.SGD(1.0), networks.crossentropy(), jit_compile=False)
            results.append(first_gradients(model, x, y))
        for got, expected in zip(*results[::-1], strict=True):
            assert transparency.worst(got, expected) < 1e-4
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})


def halved(order):
    def half(device, devices, groups):
        for action in order(device, devices, groups):
            yield from [action] if action.op == "F" else [action._replace(op="I"), action._replace(op="W")]

    return half


def test_halves_between_which_weights_change_are_refused():
    own = Scheme("late", Schedule(halved(asynchronous), flushes=False, found=unflushed), VanillaPolicy())
    with pytest.raises(ValueError, match="Received: 0W0 in the asynchronous schedule of 'late'"):
        pipetrain.PipelineModel(networks.mlp(), 2, own, devices=("CPU:0", "CPU:1"))


@pytest.mark.wide
def test_any_order_of_halves_trains():
    own = Scheme("gpipe in halves", Schedule(halved(gpipe)), FlushPolicy(), splits=True)
    single = networks.mlp()
    pm = pipetrain.PipelineModel(networks.mlp(), 2, own, devices=("CPU:0", "CPU:1"), microbatches=4)
    for model in (single, pm):
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=networks.crossentropy())
        networks.fit(model, *networks.data(81))
    networks.assert_close(pm.get_weights(), single.get_weights())


def test_what_waits_reads_inputs_and_gradients_of_outputs_alone():
    """A dense layer leaves its inputs and the gradients of its outputs; no product is made twice."""

    @tf.function(autograph=False)
    def backward(weights, residuals, fixed, output_gradients):
        (kernel,), (x, y), (upstream,) = weights, residuals, output_gradients
        through = upstream * (1.0 - y * y)
        return [tf.matmul(x, through, transpose_a=True)], [tf.matmul(through, kernel, transpose_b=True)]

    spec = tf.TensorSpec
    concrete = backward.get_concrete_function([spec((3, 2))], [spec((None, 3)), spec((None, 2))], [], [spec((None, 2))])
    halves = BackwardHalves(concrete, SEPARATE)
    assert sorted(spec.shape[-1] for spec in halves.operands) == [2, 3]
    rng = np.random.default_rng(0)
    arguments = [
        [tf.constant(rng.normal(size=size), tf.float32) for size in each]
        for each in ([(3, 2)], [(4, 3), (4, 2)], [], [(4, 2)])
    ]

    @tf.function(autograph=False)
    def first(*given):
        return halves.input_gradients(*given)

    @tf.function(autograph=False)
    def second(weights, operands):
        return halves.weight_gradients(weights, operands)

    by_input, operands = first(*arguments)
    by_weight, expected = concrete(*arguments)
    np.testing.assert_array_equal(by_input[0], expected[0])
    np.testing.assert_array_equal(second(arguments[0], operands)[0], by_weight[0])
    for function, given, count in ((first, arguments, 1), (second, (arguments[0], operands), 1)):
        graph = function.get_concrete_function(*given).graph
        assert [op.type for op in graph.get_operations()].count("MatMul") == count


def test_an_error_names_the_half(monkeypatch):
    from pipetrain.compute.functions.stage import Stage

    real = Stage.input_gradients

    def failing(self, *arguments):
        if self.segment.trainable_variables[0].path.endswith("d2/kernel"):
            raise RuntimeError("no gradients")
        return real(self, *arguments)

    monkeypatch.setattr(Stage, "input_gradients", failing)
    pm = pipelined(networks.mlp(), "zb-h1", 3, cuts=networks.cuts(6, 3), microbatches=2)
    pm.compile(keras.optimizers.SGD(0.05), loss=networks.crossentropy())
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no gradients") as caught:
        networks.fit(pm, *networks.data(40))
    assert "input gradients of minibatch 0, microbatch 0 (action 1I0)" in "".join(caught.value.__notes__)
    assert threading.active_count() <= before
