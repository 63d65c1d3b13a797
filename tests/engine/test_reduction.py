"""Sums of gradients over three devices: reduce-scatter and gather of messages of any size."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from pipetrain.compute.transfers.message import Order, reduced
from pipetrain.schemes.transfers.plan import Pack, Phase

DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{n}" for n in range(3)]
SHAPES = [(), (1,), (2,), (3, 5), (7,)]


@pytest.mark.parametrize("packs", [[(0,), (1,), (2,), (3,), (4,)], [(0, 1), (2, 3, 4)]], ids=["alone", "together"])
def test_every_device_has_the_sum_in_the_order_of_the_devices(packs):
    rng = np.random.default_rng(0)
    given = [[rng.normal(size=shape).astype("float32") for shape in SHAPES] for _ in DEVICES]
    like = {n: tf.TensorSpec(shape) for n, shape in enumerate(SHAPES)}

    @tf.function(autograph=False)
    def step(given):
        made = [(device, dict(enumerate(values))) for device, values in zip(DEVICES, given, strict=True)]
        phase = Phase(tuple(Pack(numbers, 0) for numbers in packs), 1)
        return reduced(Order(phase, "push"), made, DEVICES, like)

    wanted = [a + b + c for a, b, c in zip(*given, strict=True)]
    placed = []
    for device, values in zip(DEVICES, given, strict=True):
        with tf.device(device):
            placed.append([tf.constant(value) for value in values])
    for sums in step(placed):
        assert sorted(sums) == [*range(len(SHAPES))]
        for n, value in enumerate(wanted):
            np.testing.assert_array_equal(sums[n], value)
