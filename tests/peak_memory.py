"""Bytes that a pipeline of two stages or more has at its fullest, and those that its partition says, as JSON.

With TensorFlow's kernels, whose memory profiles know. A process of its own:
``TF_CPU_ALLOCATOR_USE_BFC=1`` makes TensorFlow's allocator count on a CPU as it does on a GPU.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.networks import NETWORKS, build, data
from pipetrain.cli.environment import start_tensorflow

STEPS = 8


def measure(name, scheme, nesterov="", stages="2"):
    start_tensorflow(int(stages))
    import keras
    import tensorflow as tf

    import pipetrain

    network = NETWORKS[name]
    model = build(network)
    x, y = data(network, network.batch_size)
    minibatches = tf.data.Dataset.from_tensors((x, y)).repeat(STEPS)
    pipe = pipetrain.PipelineModel(model, int(stages), scheme)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    pipe.compile(keras.optimizers.SGD(1e-3, momentum=0.9, nesterov=bool(nesterov)), loss, jit_compile=False)
    expected = sum(stage.memory_bytes for stage in pipe.partition(network.batch_size).stages)
    gc.collect()
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]  # the model's own weights
    pipe.fit(minibatches, verbose=0)  # traces, which takes memory too
    tf.config.experimental.reset_memory_stats("CPU:0")
    pipe.fit(minibatches, verbose=0)
    return {"expected": expected, "measured": tf.config.experimental.get_memory_info("CPU:0")["peak"] - before}


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
