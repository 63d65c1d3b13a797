"""Forward and backward as functions of their weights: split, packed, joined and ordered, against one tape."""

from __future__ import annotations

import gc

import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from networks import fit, normal

import pipetrain
from pipetrain.compute.functions.backward import Backward
from pipetrain.compute.functions.graph_rewrite import (
    inlined,
    made_when_needed,
    operations,
    sharing_constants,
    updated_one_by_one,
    updated_when_read,
)
from pipetrain.compute.functions.split import specs, split
from pipetrain.compute.functions.stage_values import packed, packed_specs, unpacked
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.optimizer.update import Update
from pipetrain.compute.profiling.block_functions import either

L = keras.layers


def recurrent():
    return [
        keras.Input((6,), dtype="int32"),
        L.Embedding(11, 7),
        L.LSTM(5, return_sequences=True),
        L.GRU(4),
        L.Dense(2),
    ]


def attentive():
    class SelfAttention(L.Layer):
        def __init__(self):
            super().__init__()
            self.attention = L.MultiHeadAttention(2, 4)

        def build(self, shape):
            self.attention.build(shape, shape)

        def call(self, x, training=None):
            return x + self.attention(x, x, training=training)

    return [keras.Input((6, 8)), L.LayerNormalization(), SelfAttention(), L.Dense(3, activation="gelu")]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("layers", "compiled"),
    [(networks.convolutional_layers, False), (recurrent, False), (recurrent, True), (attentive, False)],
)
def test_split_gradients_equal_the_tape_s(layers, compiled):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(layers())
    segment = Chain(model).segment(0, len(layers()) - 1)
    weights = [variable.value.read_value() for variable in segment.trainable_variables]
    state = [variable.value.read_value() for variable in segment.non_trainable_variables]
    spec = model.inputs[0]
    shape = (5, *spec.shape[1:])
    x = tf.zeros(shape, spec.dtype) + 3 if spec.dtype == "int32" else tf.random.stateless_normal(shape, (1, 2))
    differentiable = [x] if x.dtype.is_floating else []

    def run(weights, state, differentiable, constants):
        data = differentiable[0] if differentiable else constants[0]
        (output,), state, losses = segment.stateless_call(weights, state, [data], training=True, return_losses=True)
        return [output, *losses], (output, state)

    @tf.function
    def whole(weights, state, x):
        with tf.GradientTape() as tape:
            tape.watch([*weights, x])
            outputs, (_, state) = run(weights, state, [x] if differentiable else [], [x])
        output_gradients = [tf.ones_like(output) for output in outputs]
        return outputs[0], state, tape.gradient(outputs, [*weights, *([x] if differentiable else [])], output_gradients)

    anything = [tf.TensorSpec([None, *shape[1:]], x.dtype)]
    given = specs(weights), specs(state), anything if differentiable else [], anything
    step = split(run, *given, compiled=compiled)
    assert not compiled or all(residual.dtype != tf.variant for residual in step.residuals)
    forward, backward = (either(half, compiled) for half in (step.forward, step.backward))
    (output, new_state), residuals = forward(weights, state, differentiable, [x])
    output_gradients = [tf.ones(output.shape)] + [tf.constant(1.0)] * (len(step.outputs) - 1)
    by_weight, by_flow = backward(weights, residuals, [], output_gradients)
    expected_output, expected_state, gradients = whole(weights, state, x)
    np.testing.assert_allclose(output, expected_output, rtol=1e-5 if compiled else 0)
    networks.assert_equal(new_state, expected_state)
    for got, want in zip([*by_weight, *by_flow], gradients, strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(got), tf.convert_to_tensor(want), rtol=1e-5, atol=1e-6)


def test_backward_takes_other_weights_than_forward():
    """A Dense layer's input gradient is that of backward's kernel, its activation that of forward's."""
    layer = L.Dense(3, activation="tanh")
    segment = Chain(keras.Sequential([keras.Input((2,)), layer])).segment(0, 1)

    def run(weights, state, differentiable, constants):
        (output,), _ = segment.stateless_call(weights, state, differentiable, training=True)
        return [output], output

    x = tf.constant([[0.5, -1.0]])
    old = [tf.constant([[1.0, 2, 3], [4, 5, 6]]) / 10, tf.zeros(3)]
    new = [tf.constant([[6.0, 5, 4], [3, 2, 1]]) / 10, tf.ones(3)]
    step = split(run, specs(old), [], specs([x]), [])
    output, residuals = step.forward(old, [], [x], [])
    _, (gradient,) = step.backward(new, residuals, [], [tf.ones((1, 3))])
    np.testing.assert_allclose(gradient, (1 - output.numpy() ** 2) @ new[0].numpy().T, rtol=1e-6)


MIXED = [tf.float32, tf.int32, tf.bool, tf.float32, tf.int64]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kinds", "packs"),
    [([], 0), ([tf.float32], 1), ([tf.int32], 0), (MIXED, 1), (16 * MIXED, 1), (17 * MIXED, 2), (40 * MIXED, 3)],
)
def test_residuals_are_packed_as_few_tensors(kinds, packs):
    values = [tf.cast(tf.fill([n + 1, 2], n), kind) for n, kind in enumerate(kinds)]
    like = [tf.TensorSpec([None, 2], kind) for kind in kinds]
    pack = tf.function(packed).get_concrete_function(like)
    handed = pack(values)
    assert len(handed) == packs + kinds.count(tf.int32)  # of at most 64 each
    assert specs(pack.structured_outputs) == packed_specs(like)
    unpack = tf.function(lambda given: unpacked(given, like)).get_concrete_function(packed_specs(like))
    for found, value in zip(unpack(handed), values, strict=True):
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)
    with tf.Graph().as_default():  # where both are in one graph, the tensors are the same ones
        inner = [tf.zeros([3, 2], kind) for kind in kinds]
        assert all(a is b for a, b in zip(unpacked(packed(inner), like), inner, strict=True))


def test_a_call_that_goes_forward_and_back_packs_nothing(monkeypatch):
    graphs = {}
    traced = Backward._traced

    def kept(self, parts, microbatches):
        concrete = traced(self, parts, microbatches)
        graphs[parts.runs] = {op.type for op in concrete.graph.get_operations()}
        return concrete

    monkeypatch.setattr(Backward, "_traced", kept)
    x, y = networks.data(64)
    networks.pipeline(scheme="vanilla", cuts=networks.cuts(6, 2)).fit(x, y, verbose=0)
    assert "OptionalGetValue" in graphs[False]
    assert "OptionalGetValue" not in graphs[True]


def test_cutting_leaves_the_model_as_it_was():
    model = networks.mlp()
    calls = [len(layer._inbound_nodes) for layer in model.layers]
    pm = networks.pipeline(model)
    pm.fit(*networks.data(64), batch_size=16, verbose=0)
    assert [len(layer._inbound_nodes) for layer in model.layers] == calls
    assert model.layers[2].output.shape == (None, 16)


def layers_of(weights, x):
    for weight in weights:
        x = tf.tanh(x @ weight)
    return x


SPEC = tf.TensorSpec([4, 4])
WEIGHTS = [tf.random.stateless_normal([4, 4], (1, n)) for n in range(3)]


def waited_for(operation):
    return [each.type for each in operation.control_inputs]


def test_what_a_layer_reads_is_made_when_the_layers_before_it_are_done():
    chain = tf.function(layers_of, autograph=False).get_concrete_function([SPEC] * 3, SPEC)

    @tf.function(autograph=False)
    def ahead(weights, x):
        made = [2.0 * tf.sin(weight) for weight in weights]
        outputs = inlined(chain, made, x)
        made_when_needed(made)
        return outputs

    concrete = ahead.get_concrete_function([SPEC] * 3, SPEC)
    for kind in ("Sin", "Mul"):
        made = [each for each in concrete.graph.get_operations() if each.type == kind]
        assert [waited_for(each) for each in made] == [[], ["Tanh"], ["Tanh"]]
    x = tf.ones([4, 4])
    np.testing.assert_array_equal(ahead(WEIGHTS, x), layers_of([2.0 * tf.sin(each) for each in WEIGHTS], x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        lambda: keras.optimizers.Adam(0.1),
    ],
)
@pytest.mark.parametrize("by_all", [False, True])
def test_a_gradient_is_made_when_the_one_before_it_is_used(make, by_all):
    """Unless the updates want all of them, as clipping by their common norm does, and Keras' own operations do."""

    def pulled(weights, x):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            y = layers_of(weights, x)
        return tape.gradient(y, weights)

    def used(gradients):
        return tf.clip_by_global_norm(gradients, 0.1)[0] if by_all else gradients

    pull = tf.function(pulled, autograph=False).get_concrete_function([SPEC] * 3, SPEC)
    variables, expected = ([keras.Variable(each) for each in WEIGHTS] for _ in range(2))
    optimizer, same = make(), make()
    optimizer.build(variables)

    @tf.function(autograph=False)
    def step(weights, x):
        gradients = inlined(pull, weights, x)
        Update(optimizer, variables).apply(used(gradients))
        handles = [tf.compat.v1.get_default_graph().capture(each.value.handle) for each in variables]
        updated_when_read(weights, handles)
        updated_one_by_one(gradients, handles)

    x = tf.ones([4, 4])
    operations = step.get_concrete_function([SPEC] * 3, SPEC).graph.get_operations()
    kernel = "ResourceApplyKerasMomentum"
    in_turn = isinstance(optimizer, keras.optimizers.SGD) and not by_all
    for number, operation in enumerate(each for each in operations if each.type == kernel):
        (made,) = operation.inputs[3].op.inputs if in_turn else [None]  # the gradient, without the copy
        later = [each.name for each in made.op.control_inputs if each.type == kernel] if in_turn else []
        assert later == ([f"{kernel}_{number + 1}"] if in_turn and number < 2 else [])
    if not in_turn:
        assert not any(kernel in waited_for(each) for each in operations if each.type == "MatMul")
    writes = (kernel, "AssignSubVariableOp")
    updates = [waited_for(each) for each in operations if each.type in writes]
    assert sum("MatMul" in each for each in updates) == len(WEIGHTS)  # which read the weights that they write
    step(WEIGHTS, x)
    same.apply(used(pulled(WEIGHTS, x)), expected)
    for got, want in zip(variables, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


class Inner(L.Layer):
    """tanh(x @ w), inside a tf.function or not."""

    def __init__(self, wrap, **settings):
        super().__init__(**settings)
        self._call = tf.function(lambda x, w: tf.tanh(x @ w), autograph=False) if wrap else lambda x, w: tf.tanh(x @ w)

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 4), initializer=keras.initializers.GlorotUniform(seed=1))

    def call(self, x):
        return self._call(x, tf.convert_to_tensor(self.w))


@pytest.mark.wide
def test_backward_reads_its_own_weights_within_a_layer_s_tf_function():
    """They were taken from forward, so that vanilla trained as weight stashing does."""
    x, y, weights = normal(80, 4), normal(80, 2), []
    for wrap in (False, True):
        keras.utils.set_random_seed(0)
        layers = [keras.Input((4,)), Inner(wrap, name="a"), Inner(wrap, name="b"), L.Dense(2)]
        pm = pipetrain.PipelineModel(keras.Sequential(layers), cuts=("a", "b"), scheme="vanilla")
        pm.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        fit(pm, x, y, batch_size=8)
        weights.append(pm.get_weights())
    networks.assert_close(weights[1], weights[0], 1e-6)


class Reversal(L.Layer):
    """Turns the gradient round, so many times as strong."""

    def __init__(self, strength):
        super().__init__()
        self.strength = strength

    def call(self, x):
        @tf.custom_gradient
        def turned(x):
            return tf.identity(x), lambda gradient: -gradient * tf.convert_to_tensor(self.strength)

        return turned(x)


@pytest.mark.wide
@pytest.mark.parametrize(("make", "scheme"), parameters.combinations([tf.constant, tf.Variable], ["1f1b", "spectrain"]))
def test_a_custom_gradient_reads_what_is_no_weight_of_a_layer(make, scheme):
    """Cutting failed: AttributeError, Tensor.op is undefined when eager execution is enabled."""

    def model(strength):
        keras.utils.set_random_seed(0)
        layers = [L.Dense(8), Reversal(strength), L.Dense(6, "relu", name="middle"), Reversal(strength), L.Dense(5)]
        return keras.Sequential([keras.Input((12,)), *layers])

    x, y = networks.data(60)
    strengths = make(0.5), make(0.5)
    plain = model(strengths[0])
    pm = pipetrain.PipelineModel(model(strengths[1]), cuts=("middle",), scheme=scheme, microbatches=1)
    batch_size = 20 if scheme == "1f1b" else 60  # all at once: an update of what is not stale
    for each, strength in zip((plain, pm), strengths, strict=True):
        each.compile(keras.optimizers.SGD(0.1, momentum=0.9), networks.crossentropy())
        each.fit(x, y, batch_size=batch_size, verbose=0, shuffle=False)
        if make is tf.Variable:
            strength.assign(2.0)
        each.fit(x, y, batch_size=batch_size, verbose=0, shuffle=False)
    networks.assert_close(pm.get_weights(), plain.get_weights())


def test_loops_of_copied_operations_outlive_the_function_they_are_of():
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, power = tf.while_loop(lambda turn, _: turn < 3, lambda turn, y: (turn + 1, y * y), (0, x))
        return tape.gradient(power, x)

    def copied():
        once = tf.function(gradient, autograph=False).get_concrete_function(tf.TensorSpec([]))
        return tf.function(lambda x: operations(once, [x]), autograph=False).get_concrete_function(tf.TensorSpec([]))

    function = copied()
    gc.collect()
    assert float(function(tf.constant(1.5))) == 8 * 1.5**7


def test_equal_constants_are_one_where_nothing_is_ordered_any_more():
    @tf.function(autograph=False)
    def function(x):
        first, again = tf.constant([2.0, 3.0]), tf.constant([2.0, 3.0])
        with tf.control_dependencies([again.op]):
            y = x * first
        rows = tf.IndexedSlices(y * again, tf.constant([4, 9]), tf.constant([12]))
        return (
            y + tf.constant([2.0, 3.0]) - tf.constant([2, 3], tf.float32),
            rows,
            tf.constant([12]) + tf.constant([12]),
        )

    concrete = function.get_concrete_function(tf.TensorSpec([2]))
    copied = tf.function(lambda x: sharing_constants(concrete, [x]), autograph=False)
    x = tf.constant([5.0, 7.0])
    for got, wanted in zip(
        *(tf.nest.flatten(each(x), expand_composites=True) for each in (copied, function)), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)

    def constants(of):
        made = of.get_concrete_function(tf.TensorSpec([2])).graph.get_operations()
        return [each.get_attr("value").SerializeToString() for each in made if each.type == "Const"]

    assert len(constants(function)) > len(constants(copied))
    assert len(set(constants(function))) == 3 and len(constants(copied)) <= 4  # what is returned as it is remains
