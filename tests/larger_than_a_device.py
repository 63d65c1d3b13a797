"""Train a model on eight devices of which each may hold a quarter of what training it on one takes.

Prints as JSON the limit, what is planned for every stage, and the bytes of all variables by device but the host, which
is a ninth one.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter

import pipetrain

STAGES, WIDTH, LAYERS, ROWS = 8, 256, 32, 32

pipetrain.set_cpu_devices(STAGES + 1)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402


def bytes_by_device() -> Counter[int]:
    """Of all variables that there are."""
    gc.collect()
    found: Counter[int] = Counter()
    for variable in {id(each): each for each in gc.get_objects() if isinstance(each, tf.Variable)}.values():
        number = tf.DeviceSpec.from_string(variable.device).device_index
        found[number] += variable.dtype.size * (variable.shape.num_elements() or 0)
    return found


def main(scheme: str) -> None:
    keras.utils.set_random_seed(0)
    devices = [f"CPU:{n}" for n in range(1, STAGES + 1)]
    with tf.device(devices[0]), pipetrain.on_host():  # in place of a GPU, on which Keras makes models
        layers = [keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(10)])
    assert {*bytes_by_device()} == {0}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    whole = pipetrain.PipelineModel(model, scheme="single", devices=devices[:1])
    whole.compile(keras.optimizers.Adam(0.001), loss)
    limit_bytes = whole.partition(ROWS).fullest_bytes // 4
    del whole
    pipe = pipetrain.PipelineModel(model, STAGES, scheme, devices=devices, memory_bytes=limit_bytes)
    pipe.compile(keras.optimizers.Adam(0.001), loss)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(8 * ROWS, WIDTH)).astype("float32"), random.integers(0, 10, 8 * ROWS)
    pipe.fit(x, y, batch_size=ROWS, verbose=0)
    pipe.evaluate(x, y, batch_size=ROWS, verbose=0)
    planned = [stage.memory_bytes for stage in pipe.partition(ROWS).stages]
    found = bytes_by_device()
    del found[0]
    print(json.dumps({"limit": limit_bytes, "planned": planned, "found": sorted(found.items())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
