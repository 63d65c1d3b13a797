"""What a process of its own finds out about a card, as JSON: its memory, or a sum of gradients by NCCL.

The tests' own process divides its card among logical devices, which excludes memory growth and NCCL. With ``CPU`` in
place of ``GPU``, and ``TF_CPU_ALLOCATOR_USE_BFC=1``, the same is measured of a CPU's memory, except for the card's.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import inside
import keras
import networks
import numpy as np
import tensorflow as tf

import pipetrain

WIDTH, DEPTH, BATCH, STEPS, FITS = 256, 6, 2048, 16, 5


def card_mib():
    """MiB of each card that are in use, and that there are, by the driver; an empty list where it cannot be asked."""
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        return [[int(number) for number in line.split(",")] for line in said.splitlines()]
    except (OSError, subprocess.CalledProcessError, ValueError):
        return []


def wide():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, "tanh", name=f"d{n}") for n in range(DEPTH)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(10, name="last")])


def memory(kind):
    """Peaks of several fits of two stages on one device beside the model's own weights, and what the plan says."""
    device, before = f"{kind}:0", card_mib()
    for card in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(card, True)
    pm = pipetrain.PipelineModel(wide(), 2, "weight-stashing", devices=(device,))
    pm.compile(keras.optimizers.SGD(1e-3, momentum=0.9), networks.crossentropy())
    x = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype("float32")
    minibatches = tf.data.Dataset.from_tensors((x, np.arange(BATCH) % 10)).repeat(STEPS)
    expected = sum(stage.memory_bytes for stage in pm.partition(BATCH).stages)
    gc.collect()
    alone = tf.config.experimental.get_memory_info(device)["current"]
    pm.fit(minibatches, verbose=0)  # traces, which takes memory too
    peaks, left = [], []
    for _ in range(FITS):
        tf.config.experimental.reset_memory_stats(device)
        pm.fit(minibatches, verbose=0)
        gc.collect()
        info = tf.config.experimental.get_memory_info(device)
        peaks.append(info["peak"] - alone)
        left.append(info["current"] - alone)
    return {"expected": expected, "peaks": peaks, "left": left, "cards": [before, card_mib()]}


def nccl(kind):
    """How the gradients of two cards are summed, and the weights after training on them and on one."""
    weights = []
    for scheme, devices in (("data-parallel", (f"{kind}:0", f"{kind}:1")), ("single", (f"{kind}:0",))):
        pm = networks.pipeline(scheme=scheme, devices=devices, **({"stages": 1} if scheme == "single" else {}))
        networks.fit(pm, *networks.data(200))
        weights.append([array.tolist() for array in pm.get_weights()])
        if scheme == "data-parallel":
            summed_by = type(inside.distribution(pm).extended._cross_device_ops).__name__
            asked = inside.distribution(pm).extended._communication_options.implementation.name
    return {"summed by": summed_by, "asked for": asked, "weights": weights}


if __name__ == "__main__":
    if sys.argv[2] == "CPU":
        pipetrain.set_cpu_devices(2)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    print(json.dumps({"memory": memory, "nccl": nccl}[sys.argv[1]](sys.argv[2])))
