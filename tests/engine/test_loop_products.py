"""Weight gradients that a loop sums turn by turn are made once, of the rows of all turns."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import origin
from pipetrain.compute.functions.split import split, symbolic_gradients

ROWS, TURNS, WIDTH = 3, 5, 4

LAYERS = {
    "lstm": lambda: keras.layers.LSTM(6, return_sequences=True),
    "gru": lambda: keras.layers.GRU(6),
    "gru of old": lambda: keras.layers.GRU(6, reset_after=False, return_sequences=True),
    "simple": lambda: keras.layers.SimpleRNN(6, go_backwards=True),
    "both ways": lambda: keras.layers.Bidirectional(keras.layers.LSTM(6)),
    "stacked": lambda: keras.layers.RNN([keras.layers.LSTMCell(6), keras.layers.GRUCell(5)]),
    "convolutional": lambda: keras.layers.Dense(3),  # no loop
}


def halves_of(layer, with_mask=False):
    """Forward and backward of the layer, and what they are given."""
    x = np.random.default_rng(0).normal(size=(ROWS, TURNS, WIDTH)).astype("float32")
    layer.build(x.shape)
    variables = layer.trainable_variables
    mask = tf.constant([[True, True, True, False, False], [True] * TURNS, [True, True, False, True, True]])

    def run(weights, state, differentiable, constants):
        with keras.StatelessScope(state_mapping=list(zip(variables, weights, strict=True))):
            return [layer(differentiable[0], **({"mask": mask} if with_mask else {}))], []

    specs = [tf.TensorSpec(each.shape) for each in variables]
    halves = split(run, specs, [], [tf.TensorSpec((None, TURNS, WIDTH))], [])
    return halves, run, [each.value for each in variables], tf.constant(x)


@pytest.mark.wide
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_the_tape_s(name, with_mask):
    if with_mask and name == "convolutional":
        return
    halves, run, weights, x = halves_of(LAYERS[name](), with_mask)
    with tf.GradientTape() as tape:
        tape.watch([*weights, x])
        outputs, _ = run(weights, [], [x], [])
        start = tf.constant(np.random.default_rng(1).normal(size=outputs[0].shape).astype("float32"))
    by_weight, by_input = tape.gradient(outputs, [weights, [x]], [start])
    _, residuals = halves.forward(weights, [], [x], [])
    ours = halves.backward(weights, residuals, [], [start])
    for mine, expected in zip([*ours[0], *ours[1]], [*by_weight, *by_input], strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


def needed_for(tensors):
    """The operations that lead to these tensors."""
    found, waiting = {}, [each.op for each in tensors]
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found[operation.name] = operation
            waiting += [each.op for each in operation.inputs]
    return list(found.values())


@pytest.mark.wide
@pytest.mark.parametrize("name", ["lstm", "gru", "simple", "both ways", "stacked"])
def test_kernels_gradients_are_products_after_the_loop(name):
    halves, _, weights, _ = halves_of(LAYERS[name]())
    kernels = [n for n, each in enumerate(weights) if each.shape.rank == 2 and each.shape[0] >= WIDTH]
    gradients = symbolic_gradients(halves)
    assert {origin(gradients[n]).type for n in kernels} == {"MatMul"}
    bodies = {each.signature.name: each for each in halves.backward.graph.as_graph_def().library.function}
    loops = [each for each in needed_for(halves.backward.outputs) if each.type == "StatelessWhile"]
    within = [node for loop in loops for node in bodies[loop.get_attr("body").name].node_def]
    assert within and not [node for node in within if node.op == "MatMul" and node.attr["transpose_a"].b]
