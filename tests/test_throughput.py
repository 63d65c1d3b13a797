"""The benchmark's table, and PyTorch's twins where PyTorch is installed."""

import pytest

from benchmarks.networks import COMPARED, build
from benchmarks.sides import Figures
from benchmarks.throughput import rows


def test_ratios_are_of_one_round_and_of_the_own_framework():
    rounds = [
        {
            "Keras, 1 core": Figures(100.0 * speed),
            "Keras, 1 core, XLA": Figures(50.0 * speed),
            "spectrain": Figures(180.0 * speed, 2.0),
            "PyTorch, 1 core": Figures(40.0 * speed),
            "PyTorch Schedule1F1B": Figures(60.0 * speed, 1.5),
        }
        for speed in (1, 2, 5)  # a machine that drifts
    ]
    lines = {line[0]: line[1:] for line in rows(rounds)}
    assert lines["spectrain"] == ("360", "1.80", "1.80 - 1.80", "2.00", "90%")
    assert lines["PyTorch Schedule1F1B"] == ("120", "1.50", "1.50 - 1.50", "1.50", "100%")
    assert lines["Keras, 1 core, XLA"] == ("100", "0.50", "0.50 - 0.50", "", "")


@pytest.mark.parametrize("name", COMPARED)
def test_twins_have_as_many_weights(name):
    pytest.importorskip("torch")
    from benchmarks.torch_networks import blocks

    theirs = sum(each.numel() for block in blocks(COMPARED[name]) for each in block.parameters())
    ours = sum(each.shape.num_elements() for each in build(COMPARED[name]).trainable_variables)
    second_biases = 4 * 256 * 4 if name == "residual_lstm" else 0  # PyTorch's LSTMs have two
    assert theirs == ours + second_biases
