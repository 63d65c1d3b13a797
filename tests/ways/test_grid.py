"""Training on a grid of devices: the weights of plain Keras, and the bytes of Equation 8 of arXiv 1712.04432."""

from __future__ import annotations

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
from interrupted import assert_goes_on, assert_keeps_steps

import pipetrain
from pipetrain.compute.graph.wide_layers import network_of, wide_layers
from pipetrain.compute.grid.step import GridStep
from pipetrain.plan.grid_cost import traffic
from pipetrain.schemes.grid import Grid

GRIDS = ((1, 4), (4, 1), (2, 2), (1, 3), (2, 1))
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "decaying": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipped": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.05),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.8), momentum=0.9),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "averaging": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9),
    "accumulating": lambda: keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.SGD(0.05, loss_scale_factor=16.0),
}
DATA = networks.data(70)  # whose last batch is short


def names(devices):
    return tuple(f"CPU:{n}" for n in range(devices))


def trained(model, optimizer="momentum", data=DATA, fit=None, **settings):
    """The model after two epochs, by itself or by a scheme, and its History."""
    if settings:
        grid = settings.get("grid")
        settings = {"devices": names(grid[0] * grid[1]) if grid else names(2), **settings}
    model = networks.in_way(model, **settings) if settings else model
    model.compile(OPTIMIZERS[optimizer](), networks.crossentropy(), metrics=["accuracy"])
    return model, networks.fit(model, *data, epochs=2, validation_data=data, **(fit or {})).history


def dense():
    """Layers of uneven widths."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, "tanh") for width in (13, 7, 16)]
    return keras.Sequential([keras.Input((networks.FEATURES,)), *layers, keras.layers.Dense(networks.CLASSES)])


def changed():
    """After they were built: Keras asks the weights, not their layer, for penalties and constraints."""
    model = dense()
    first, second, *_ = model.layers
    first.kernel_regularizer, first.bias_constraint = keras.regularizers.L2(0.1), keras.constraints.NonNeg()
    second.kernel.regularizer = keras.regularizers.L1(0.01)
    return model


def convolutional():
    """Convolutions of uneven channels, in either order of the axes, and dense layers of which one has a penalty."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Conv2D(5, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(6, 3, strides=2, activation="tanh"),
        keras.layers.Flatten(),
        keras.layers.Dense(9, "relu", kernel_regularizer="l2"),
        keras.layers.Dense(networks.CLASSES),
    ]
    return keras.Sequential([keras.Input((8, 8, 3)), *layers])


EXACT = {
    "dense": (dense, DATA),
    "changed": (changed, DATA),
    "convolutional": (convolutional, (networks.normal(70, 8, 8, 3), DATA[1])),
}


@pytest.mark.parametrize(
    ("kind", "grid"),
    parameters.combinations(
        tuple(EXACT), GRIDS, default=[], wide=[("changed", (2, 1)), ("changed", (2, 2)), ("convolutional", (2, 1))]
    ),
)
def test_weights_and_logs_are_those_of_plain_keras(kind, grid):
    make, data = EXACT[kind]
    single, expected = trained(make(), data=data)
    pm, history = trained(make(), data=data, scheme="grid", grid=grid)
    networks.assert_close(pm.get_weights(), single.get_weights())
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, atol=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("name", parameters.by_default(OPTIMIZERS, "clipped"))
def test_optimizers_update_parts_as_the_whole(name):
    single, _ = trained(dense(), name)
    pm, _ = trained(dense(), name, scheme="grid", grid=(2, 1))
    networks.assert_close(pm.get_weights(), single.get_weights())
    assert int(pm.optimizer.iterations) == int(single.optimizer.iterations)
    for mine, expected in zip(pm.optimizer.variables, single.optimizer.variables):
        networks.assert_close([np.asarray(mine)], [np.asarray(expected)])


def noisy():
    """State, draws and a weight that a layer assigns to, beside divided layers."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(12, "relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2, seed=2),
        keras.layers.SpectralNormalization(keras.layers.Dense(8)),
        keras.layers.Dense(9, "gelu"),
    ]
    return keras.Sequential([keras.Input((networks.FEATURES,)), *layers, keras.layers.Dense(networks.CLASSES)])


def words():
    """Masks, rows of an embedding, and products over a sequence."""
    keras.utils.set_random_seed(1)
    x = keras.Input((6,), dtype="int32")
    y = keras.layers.Embedding(20, 4, mask_zero=True)(x)
    heads = keras.layers.EinsumDense("abc,cde->abde", (6, 2, 3), bias_axes="de", activation="tanh")(y)
    y = keras.layers.add([y, keras.layers.EinsumDense("abde,dec->abc", (6, 4), bias_axes="c")(heads)])
    y = keras.layers.LSTM(5)(keras.layers.Dense(8, "relu")(y))
    return keras.Model(x, keras.layers.Dense(networks.CLASSES)(y))


def branching():
    """A value that divided layers, others and the output read; a shared layer, and two outputs of which one is used."""
    keras.utils.set_random_seed(1)
    x = keras.Input((networks.FEATURES,))
    y = keras.layers.Dense(12, "tanh")(x)
    shared = keras.layers.Dense(12, "tanh", kernel_regularizer="l2", activity_regularizer="l2")
    y = keras.layers.add([keras.layers.Dense(12, "relu")(y), shared(y), shared(shared(x)), y])
    return keras.Model(x, keras.layers.Dense(networks.CLASSES)(y))


MODELS = {
    "noisy": (noisy, DATA[0]),
    "words": (words, np.random.default_rng(0).integers(0, 20, (70, 6))),
    "branching": (branching, DATA[0]),
}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "grid"), parameters.combinations(tuple(MODELS), ((2, 1), (2, 2), (3, 1)), default=[("branching", (2, 1))])
)
def test_models_train_as_replicas_of_one_stage_do(kind, grid):
    """What is not divided sees a device's own rows, as with all-reduce."""
    make, x = MODELS[kind]
    devices = grid[0] * grid[1]
    replicas, expected = trained(make(), data=(x, DATA[1]), scheme="all-reduce", devices=names(devices), order="none")
    pm, history = trained(make(), data=(x, DATA[1]), scheme="grid", grid=grid)
    networks.assert_close(pm.get_weights(), replicas.get_weights())
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("grid", parameters.by_default(((2, 2), (3, 1), (1, 3)), (2, 2)))
def test_a_minibatch_of_fewer_rows_than_devices_trains_with_them(grid):
    data = networks.data(41)  # whose last batch has one row
    single, _ = trained(dense(), data=data)
    pm, _ = trained(dense(), data=data, scheme="grid", grid=grid)
    networks.assert_close(pm.get_weights(), single.get_weights())


def sent(model, data, grid, rows=20):
    """The bytes of the messages of a step, by what they are."""
    pm = networks.in_way(model, scheme="grid", grid=grid, devices=names(grid[0] * grid[1]))
    pm.compile("sgd", networks.crossentropy())
    pm.exact_trace = True
    networks.fit(pm, *(each[:rows] for each in data), batch_size=rows)
    transfers = pm.trace.transfers
    assert all(each.total_s <= pm.trace.duration_s for each in pipetrain.idle(pm.trace).values())
    return pm, tuple(int(transfers.size_bytes[transfers.op == op].sum()) for op in "FBR")


@pytest.mark.wide
@pytest.mark.parametrize("grid", parameters.by_default(GRIDS, (2, 2)))
def test_bytes_are_those_of_equation_8(grid):
    """Of dense layers that are all divided; of the gradients of inputs each device gets the sums of its own part."""
    outputs, parts = grid
    rows, widths, devices = 24, (8, 16, 12, 4), outputs * parts
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, "tanh") for width in widths[:-1]]
    model = keras.Sequential([keras.Input((networks.FEATURES,)), *layers, keras.layers.Dense(widths[-1])])
    x, y = networks.data(rows)
    _, (gathered, scattered, reduced) = sent(model, (x, np.minimum(y, 3)), grid, rows)
    of_layers = [4 * devices * rows / parts * (outputs - 1) / outputs * width for width in widths]
    of_layers[-1] /= outputs  # of the model's outputs each device needs its own rows alone
    weights = [width * (before + 1) for before, width in zip((networks.FEATURES, *widths), widths)]
    assert gathered == scattered == pytest.approx(sum(of_layers), abs=1e-6)
    assert reduced == pytest.approx(sum(8 * devices * (parts - 1) / parts * each / outputs for each in weights))


@pytest.mark.parametrize(
    ("kind", "grid"), parameters.combinations(("dense", "convolutional", "words", "branching"), GRIDS, default=[])
)
def test_bytes_are_those_that_the_planner_counts(kind, grid):
    """Uneven parts included."""
    make, (x, y) = EXACT[kind] if kind in EXACT else (MODELS[kind][0], (MODELS[kind][1], DATA[1]))
    pm, found = sent(make(), (x, y), grid, 23)
    chain = inside.planner(pm).chain
    wide = wide_layers(chain.blocks)
    divided = [layer.name for layer in wide if layer.size >= grid[0]]
    expected = traffic(network_of(chain, wide), Grid(*grid), divided, 23)
    assert found[1] == expected.scattered
    if kind != "words":  # whose LSTM's shapes are not known before it runs, and which sends the rows of its embedding
        assert found == expected


@pytest.mark.wide
@pytest.mark.parametrize("grid", parameters.by_default((None, (2, 1)), (2, 1)))
def test_evaluation_prediction_and_files_have_the_weights_of_all_steps(grid, tmp_path):
    (single, _), (pm, _) = trained(dense()), trained(dense(), scheme="grid", grid=grid)
    networks.assert_has_the_weights_of_all_steps(pm, single, DATA, tmp_path)


@pytest.mark.wide
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path):
    """Bitwise, slots of divided weights included; snapshots on the way are those of plain Keras."""
    assert_goes_on(
        lambda: networks.in_way(dense(), scheme="grid", grid=(2, 1), devices=names(2)), dense(), DATA, tmp_path
    )


@pytest.mark.wide
def test_an_interrupt_just_after_a_step_leaves_the_weights_of_that_step(monkeypatch):
    pm = networks.in_way(dense(), scheme="grid", grid=(2, 1), devices=names(2))
    assert_keeps_steps(pm, dense(), DATA, GridStep, "__call__", OPTIMIZERS["momentum"], monkeypatch)


@pytest.mark.wide
def test_every_operation_of_a_step_is_on_a_device_of_its_own():
    """Else it would run on the controller, from which workers on other hosts cannot fetch."""
    pm, _ = trained(convolutional(), data=EXACT["convolutional"][1], scheme="grid", grid=(2, 2))
    steps = inside.runner(pm)._step._functions.values()
    free = [each for step in steps for each in step.graph.get_operations() if not each.device]
    assert {each.type for each in free} <= {"Placeholder", "ReadVariableOp", "Identity", "NoOp"}
    results = [each for each in free if each.type == "Identity"]
    assert len(results) <= 2 * len(steps)  # of the whole function, to this process


@pytest.mark.wide
def test_the_grid_divides_the_layers_that_it_names():
    single, _ = trained(networks.mlp())
    pm, _ = trained(networks.mlp(), scheme="grid", grid=Grid(2, 1, ("d1",)))
    networks.assert_close(pm.get_weights(), single.get_weights())
    assert [piece.wide and piece.wide.name for piece in inside.weights(pm).pieces] == [None, "d1", None]


@pytest.mark.parametrize(
    ("settings", "error", "problem"),
    [
        ({"scheme": "vanilla", "grid": (1, 2)}, ValueError, "Only the scheme 'grid'.*scheme='vanilla'"),
        ({"grid": (2, 2), "devices": names(3)}, ValueError, "a device in each of its places.*grid=.2, 2., 3 devices"),
        ({"grid": (2, 1), "stages": 4}, ValueError, "stages=4"),
        ({"grid": (0, 2)}, ValueError, r"counts from 1 up.*grid=\(0, 2\)"),
        ({"grid": "square"}, TypeError, "grid='square'"),
        ({"grid": 4}, TypeError, "grid=4"),
        ({"grid": Grid(2, 1, ("none",))}, ValueError, r"with \['none'\].*Try some of: d0"),
        ({"grid": Grid(2, 1, "d0")}, TypeError, "tuple of names"),
        ({"grid": Grid(6, 1, ("d5",)), "devices": ("CPU:0",) * 6}, ValueError, "'d5' with 5 outputs"),
        ({"grid": (2, 1), "order": "tic"}, ValueError, "Only all-reduce and parameter-server order"),
        ({"grid": (2, 1), "cuts": ("d1",)}, ValueError, "cuts="),
        ({"grid": (2, 1), "replicas": (2,)}, ValueError, "has no stages to replicate"),
        ({"grid": (2, 1), "recompute": True}, ValueError, "Only stages run their forward again"),
        ({"grid": (2, 1), "microbatches": 2}, ValueError, "does not split a minibatch"),
    ],
)
def test_what_a_grid_does_not_have_is_refused(settings, error, problem):
    with pytest.raises(error, match=problem):
        networks.in_way(networks.mlp(), **{"scheme": "grid", **settings})


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        (keras.optimizers.Lamb(0.1), "each element alone.*optimizer=Lamb.*all-reduce"),
        (keras.optimizers.Adafactor(0.1), "optimizer=Adafactor"),
        (keras.optimizers.SGD(0.1, clipnorm=1.0), r"SGD\(clipnorm=1.0\).*global_clipnorm"),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "Dynamic loss scaling.*scheme='grid'"),
    ],
    ids=["lamb", "adafactor", "clipnorm", "scaling"],
)
def test_optimizers_that_need_whole_weights_are_refused(optimizer, problem):
    pm = networks.in_way(networks.mlp(), scheme="grid", grid=(2, 1))
    with pytest.raises(ValueError, match=problem):
        pm.compile(optimizer, networks.crossentropy())


@pytest.mark.wide
def test_optimizers_that_need_whole_weights_train_where_none_is_divided():
    single, pm = dense(), networks.in_way(dense(), scheme="grid", grid=(1, 2))
    for model in (single, pm):
        model.compile(keras.optimizers.Lamb(0.01), networks.crossentropy())
        networks.fit(model, *DATA)
    networks.assert_close(pm.get_weights(), single.get_weights())
