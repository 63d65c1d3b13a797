"""Fingerprints, by which it is known what a worker has to be sent."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from pipetrain.compute.functions.flat_values import _fingerprints

TYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int64", "uint32", "bool", "complex64")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 5)])
def test_equal_bytes_have_equal_fingerprints_and_others_do_not(dtype, shape):
    value = tf.cast(np.random.default_rng(0).integers(2, size=shape), dtype)
    made = _fingerprints([value, tf.Variable(value)]).numpy()
    assert made.shape == (2, 8) and np.array_equal(*made)
    if 0 not in shape:
        flat = tf.reshape(value, [-1]).numpy()
        changed = flat.view(np.uint8)
        changed[-1] ^= 1
        other = _fingerprints([tf.reshape(tf.constant(flat, dtype), shape)]).numpy()
        assert not np.array_equal(other[0], made[0])


def test_numbers_that_are_equal_but_not_bitwise_differ():
    zeros = _fingerprints([tf.constant([0.0]), tf.constant([-0.0])]).numpy()
    assert not np.array_equal(*zeros)
    nothing = _fingerprints([tf.constant([np.nan]), tf.constant([np.nan])]).numpy()
    assert np.array_equal(*nothing)
