"""Bytes that a pipeline of four stages has at its fullest beyond the model, trained whole or by adapters, as JSON.

A process of its own: ``TF_CPU_ALLOCATOR_USE_BFC=1`` makes TensorFlow's allocator count on a CPU as it does on a GPU.
Frozen weights on a device that has the model are the model's own buffers, so what is measured is all but them. Run by

    TF_CPU_ALLOCATOR_USE_BFC=1 python tests/frozen_memory.py SCHEME all|adapters
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.cli.environment import start_tensorflow

DEPTH, WIDTH, RANK, ROWS, STEPS, REPEATS = 24, 512, 4, 8, 12, 3


def measure(scheme, trains):
    start_tensorflow(4)
    import keras
    import numpy as np
    import tensorflow as tf

    import pipetrain

    layers = [keras.layers.Dense(WIDTH, "tanh", name=f"d{n}") for n in range(DEPTH)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    if trains == "adapters":
        for layer in layers:
            layer.enable_lora(RANK)
            layer.bias.trainable = False
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    minibatches = tf.data.Dataset.from_tensors((x, x)).repeat(STEPS)
    pm = pipetrain.PipelineModel(model, scheme=scheme, cuts=[f"d{DEPTH * n // 4 - 1}" for n in (1, 2, 3)])
    pm.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse", jit_compile=False)
    gc.collect()
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]  # the model's own weights
    pm.fit(minibatches, verbose=0)  # traces, which takes memory too
    peaks = []
    for _ in range(REPEATS):  # which stages are at work at once is another in each
        tf.config.experimental.reset_memory_stats("CPU:0")
        pm.fit(minibatches, verbose=0)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
    weights, trained = (
        sum(int(np.prod(each.shape)) * 4 for each in some) for some in (model.weights, model.trainable_weights)
    )
    return {"weights": weights, "trained": trained, "peaks": peaks}


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
