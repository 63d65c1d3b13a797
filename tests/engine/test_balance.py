"""The balance of data and model parallelism: the figures of arXiv 1602.06709, and the layers of Keras models."""

from __future__ import annotations

import math

import keras
import networks
import pytest

from pipetrain.cli import main as command_line
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.wide_layers import wide_layers
from pipetrain.plan.balance import (
    Balance,
    LayerShape,
    WeightBlocks,
    best_parts,
    block_bytes,
    block_ratio,
    break_even_rows,
    choice,
    data_ratio,
    least_rows,
    model_ratio,
    most_devices,
)

# OverFeat-FAST: the first and the fifth convolution, and the first dense layer.
C1 = LayerShape("C1", 96, 231 * 231 * 3, 56 * 56 * 96, 96 * 11 * 11 * 3, 11 * 11, 56 * 56, 231 * 231)
C5 = LayerShape("C5", 1024, 1024 * 12 * 12, 1024 * 12 * 12, 1024 * 1024 * 9, 9, 12 * 12, 14 * 14)
F1 = LayerShape.dense("F1", 36864, 3072)
SYSTEMS = (386, 2250, 480)  # FLOP/B
LEAST = {
    ("C1", True): [1, 1, 1],
    ("C5", True): [2, 11, 3],
    ("F1", True): [258, 1500, 320],
    ("C5", False): [4, 21, 5],
    ("F1", False): [515, 3000, 640],
}


@pytest.mark.parametrize(("name", "overlap"), LEAST)
def test_the_least_rows_of_a_device_are_those_of_the_source(name, overlap):
    layer = {each.name: each for each in (C1, C5, F1)}[name]
    assert [least_rows(layer, system, overlap) for system in SYSTEMS] == LEAST[name, overlap]


def test_the_most_devices_are_those_of_the_source():
    assert most_devices(C5, SYSTEMS[0]) == 13
    assert most_devices(LayerShape.dense("fc", 4096, 4096), SYSTEMS[0]) == 7


def test_the_inequality_is_consistent_unless_it_is_asked_for_as_printed():
    assert break_even_rows(F1) == 1536
    assert break_even_rows(F1, printed=True) == 1024
    assert break_even_rows(F1, overlap=False) == 3072
    assert [choice(F1, rows) for rows in (1535, 1536)] == ["model", "data"]
    assert [choice(F1, rows, printed=True) for rows in (1023, 1024)] == ["model", "data"]
    assert Balance([C1, C5, F1], 16, 256, 386).choices() == {"C1": "data", "C5": "data", "F1": "model"}


@pytest.mark.parametrize("devices", [2, 5, 16])
@pytest.mark.parametrize("layer", [C5, F1])
def test_at_break_even_the_ratios_are_equal_for_any_number_of_devices(layer, devices):
    rows = break_even_rows(layer) / devices
    assert model_ratio(layer, devices) == pytest.approx(data_ratio(layer, rows))


def test_an_overlap_lies_between_all_and_nothing():
    assert [data_ratio(F1, 10, overlap) for overlap in (0, 0.5, 1)] == [7.5, 10, 15]
    with pytest.raises(ValueError, match=r"Received: overlap=1\.5"):
        Balance([C1], 4, 256, 386, overlap=1.5)
    assert "overlap 0.25" in str(Balance([C1], 4, 256, 386, overlap=0.25))


def test_maps_and_operations_are_those_of_the_layer():
    assert [layer.input_maps for layer in (C1, C5, F1)] == [3, 1024, 36864]
    assert [layer.flops for layer in (C1, C5, F1)] == [
        2 * 96 * 3 * 121 * 56 * 56,
        2 * 1024 * 1024 * 9 * 144,
        2 * 36864 * 3072,
    ]


@pytest.mark.parametrize("devices", [2, 16])
@pytest.mark.parametrize("layer", [C1, C5, F1])
def test_blocks_of_outputs_alone_are_the_source_s(layer, devices):
    assert block_ratio(layer, WeightBlocks(1, devices)) == pytest.approx(model_ratio(layer, devices))
    assert block_ratio(layer, WeightBlocks(1, 1)) == math.inf


def test_inputs_divided_reduce_partial_sums():
    """4096 to 1024 on 4 devices: sums of 1024 outputs, with their gradients, or 4096 inputs, or halves of both.

    Three products of 2 operations a weight are shared by the devices; 8 bytes a number for the two exchanges.
    """
    layer, products = LayerShape.dense("fc", 4096, 1024), 3 * 2 * 4096 * 1024 / 4
    assert block_bytes(layer, WeightBlocks(1, 4)) == 8 * 4096
    assert block_bytes(layer, WeightBlocks(4, 1)) == 8 * 1024
    assert block_bytes(layer, WeightBlocks(2, 2)) == 8 * (2048 + 512)
    assert block_ratio(layer, WeightBlocks(4, 1)) == products / (8 * 1024)
    assert best_parts(layer, 4) == WeightBlocks(4, 1)
    assert best_parts(layer, 16) == WeightBlocks(8, 2)
    assert best_parts(LayerShape.dense("square", 4096, 4096), 16) == WeightBlocks(4, 4)
    assert best_parts(LayerShape.dense("small", 2, 2), 16) is None


@pytest.mark.parametrize("layer", [C5, F1, LayerShape.dense("square", 4096, 4096)])
def test_the_best_blocks_are_the_best_of_all(layer):
    best = best_parts(layer, 12)
    assert block_ratio(layer, best) == max(block_ratio(layer, WeightBlocks(n, 12 // n)) for n in (1, 2, 3, 4, 6, 12))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Received: devices=0"):
        Balance([C1], 0, 256, 386)
    with pytest.raises(ValueError, match="Received: system=inf"):
        Balance([C1], 4, 256, float("inf"))


def einsum_layers(equation, shape, **settings):
    x = keras.Input((7, 12))
    return Chain(keras.Model(x, keras.layers.EinsumDense(equation, shape, **settings)(x))).blocks


def test_shapes_are_those_of_keras_layers():
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Conv2D(8, 3, strides=2, activation="relu", name="conv"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, "gelu", name="dense"),
        keras.layers.Dense(5, "softmax"),  # of all outputs together
    ]
    conv, dense = wide_layers(Chain(keras.Sequential([keras.Input((16, 16, 3)), *layers])).blocks)
    assert conv.shape == LayerShape("conv", 8, 16 * 16 * 3, 7 * 7 * 8, 224, 9, 49, 15 * 15)
    assert dense.shape == LayerShape.dense("dense", 392, 64)
    (heads,) = wide_layers(einsum_layers("abc,cde->abde", (7, 3, 4), bias_axes="de"))
    assert heads.shape == LayerShape(heads.name, 12, 84, 84, 156, 1, 7, 7)
    assert (heads.axis, heads.axes, heads.size) == (2, (1, 0), 3)
    assert heads.narrowed(2).get_config()["output_shape"] == (7, 2, 4)


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.Dense(6, kernel_constraint="max_norm"),
        keras.layers.Dense(6, activity_regularizer="l2"),
        keras.layers.Dense(6, kernel_regularizer="orthogonal_regularizer"),
        keras.layers.Dense(6, trainable=False),
        keras.layers.EinsumDense("abc,cd->abd", (7, 6), bias_axes="b"),
        keras.layers.Conv1D(6, 3, groups=3),
        keras.layers.LSTM(6),
    ],
    ids=lambda layer: layer.name,
)
def test_layers_whose_outputs_belong_together_are_not_divided(layer):
    x = keras.Input((7, 12))
    assert wide_layers(Chain(keras.Model(x, layer(x))).blocks) == []


@pytest.mark.wide
def test_the_command_prints_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pipetrain.cli.given.start_tensorflow", lambda devices: None)
    networks.small().save(tmp_path / "m.keras")
    (tmp_path / "cluster.json").write_text('{"levels": [{"bandwidth": "1Gb/s"}]}')
    given = ["plan", str(tmp_path / "m.keras"), "--devices", "2", "--cluster", str(tmp_path / "cluster.json")]
    for extra in ([], ["--no-overlap"], ["--as-printed"], ["--overlap", "0.5"]):
        assert command_line.main([*given, "--batch-size", "8", "--balance", *extra]) in (None, 0)
        words = {*capsys.readouterr().out.split()}  # names of columns may be broken over lines
        assert {"layer", "FLOP/B", "least", "most", "devices", "even", "better"} <= words
