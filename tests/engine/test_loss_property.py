"""Whatever loss, labels, weights and masks: unequal parts have together what the whole has, or it is refused."""

from __future__ import annotations

from itertools import pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.compute.keras_private import compiled_loss, set_mask
from pipetrain.frontend.compilation import LossOfParts
from pipetrain.frontend.metrics import TrackedMetrics
from pipetrain.run.channels import take

losses, ops = keras.losses, keras.ops
CLASSES = 3
REDUCTIONS = ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight"]
DENSE = ["MeanSquaredError", "MeanAbsoluteError", "Huber", "LogCosh", "CosineSimilarity", "KLDivergence", "Poisson"]
DENSE += ["MeanSquaredLogarithmicError", "MeanAbsolutePercentageError", "Hinge", "SquaredHinge", "CategoricalHinge"]
DENSE += ["BinaryCrossentropy", "BinaryFocalCrossentropy", "CategoricalCrossentropy", "CategoricalFocalCrossentropy"]
DENSE += ["Dice", "Tversky"]
WHOLE = ("Dice", "Tversky")


def nan_aware(y, outputs):
    return ops.mean(ops.square(ops.where(ops.isnan(y), outputs, y) - outputs), -1)


def nan_mean(y, outputs):
    known = ops.logical_not(ops.isnan(y))
    return ops.sum(ops.where(known, ops.square(ops.where(known, y, 0.0) - outputs), 0.0)) / ops.sum(
        ops.cast(known, "float32")
    )


def above(y, outputs):
    chosen = ops.cast(y > 0.625, "float32")
    return ops.sum(chosen * ops.square(y - outputs)) / ops.maximum(ops.sum(chosen), 1.0)


OWN = {nan_aware: True, nan_mean: False, above: False}
SPARSE = [(ignored, from_logits) for ignored in (None, 0, -1, 2) for from_logits in (False, True)]


class Combined:
    """A compiled loss of sequences of open lengths, whole and by parts."""

    def __init__(self, loss, masked):
        tokens = keras.Input((None,), dtype="int32")
        states = keras.layers.Embedding(5, CLASSES, mask_zero=masked)(tokens)
        model = keras.Model(tokens, keras.layers.Activation("softmax")(states))
        model.compile("sgd", loss)
        self.loss = compiled_loss(model)
        vars(model)["inner"] = model  # as a PipelineModel has it, past Keras' search for layers
        metrics = TrackedMetrics(model, model.outputs, lambda each: each[0], tf.Variable(0), lambda: None)
        self.of_parts, self.of_part = LossOfParts(loss, 3, metrics, model), metrics.loss

    def gradients(self, x, y, outputs, weights, masked):
        """Those of the outputs: by the whole, and by the parts."""
        mask = tf.constant(x != 0) if masked else None
        x, y, outputs = tf.constant(x, tf.int32), tf.constant(y), tf.constant(outputs)
        weights = None if weights is None else tf.constant(weights, tf.float32)
        rows = outputs.shape[0]
        self.of_parts.try_on(y, weights, lambda: [tf.TensorSpec((None, *outputs.shape[1:]))])
        weigh = self.of_parts.weigh
        targets = y, weights if weigh is None else weigh(y, weights, [x])
        ends = [0, 1, 1 + rows // 3, rows]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(outputs)
            given = tf.identity(outputs)
            set_mask(given, mask)
            whole, parts = self.loss(y, given, weights), 0.0
            for start, end in pairwise(ends):
                part = outputs[start:end]
                set_mask(part, None if mask is None else mask[start:end])
                (labels, of_part) = take(targets, range(start, end), rows)
                share = (end - start) / rows if self.of_parts.is_mean else 1.0
                parts += share * self.of_part(labels, [part], of_part)
        return (whole, tape.gradient(whole, outputs)), (parts, tape.gradient(parts, outputs))


def assert_combined(loss, masked, data, refuses=False):
    try:
        expected, got = Combined(loss, masked).gradients(*data, masked)
    except ValueError as error:
        assert "cannot be put together" in str(error) and refuses
        return
    assert not refuses, "taken for a mean or a sum"
    assert np.isnan(expected[0]) == np.isnan(got[0])
    np.testing.assert_allclose(got[0], expected[0], rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-6)


@st.composite
def sequences(draw, labels):
    """Tokens, labels, probabilities and sample weights of some rows of one length."""
    rows, length = draw(st.integers(3, 9)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    x = rng.integers(0, 5, (rows, length))
    outputs = rng.dirichlet(np.ones(CLASSES), (rows, length)).astype("float32")
    weights = draw(
        st.sampled_from([None, np.ones((rows, length)), rng.uniform(0, 3, (rows, length)), np.zeros((rows, length))])
    )
    return x, labels(rng, rows, length), outputs, weights


def dense(rng, rows, length):
    return rng.choice([0.0, 1.0, 0.5], (rows, length, CLASSES)).astype("float32")


@pytest.mark.wide
@settings(max_examples=25)
@given(
    st.sampled_from(DENSE),
    st.sampled_from(REDUCTIONS),
    st.booleans(),
    sequences(dense),
)
def test_losses_of_keras(kind, reduction, masked, data):
    if kind in WHOLE:
        masked, data = False, (*data[:3], None)
    y = data[1]
    refuses = kind in WHOLE or (kind in ("Hinge", "SquaredHinge") and (y == 0).any() and (y == 0.5).any())
    assert_combined(getattr(losses, kind)(reduction=reduction), masked, data, refuses)


@pytest.mark.wide
@settings(max_examples=25)
@given(
    st.sampled_from(SPARSE),
    st.sampled_from(REDUCTIONS),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    sequences(lambda rng, rows, length: rng.integers(0, CLASSES, (rows, length))),
    st.integers(0, 99),
)
def test_ignored_classes(kind, reduction, masked, often, data, seed):
    ignored, from_logits = kind
    x, y, outputs, weights = data
    if ignored is not None:
        y = np.where(np.random.default_rng(seed).random(y.shape) < often, ignored, y)
    loss = losses.SparseCategoricalCrossentropy(from_logits=from_logits, ignore_class=ignored, reduction=reduction)
    assert_combined(loss, masked, (x, y, outputs, weights))


@settings(max_examples=10)
@given(st.sampled_from([*OWN]), st.sampled_from([0.0, 0.5]), sequences(dense), st.integers(0, 99))
def test_losses_of_ones_own(loss, often, data, seed):
    """Whether labels are missing in the first minibatch or not."""
    x, y, outputs, _ = data
    y = np.where(np.random.default_rng(seed).random(y.shape) < often, np.nan, y).astype("float32")
    assert_combined(loss, False, (x, y, outputs, None), refuses=not OWN[loss])
