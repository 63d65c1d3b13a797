"""Train on two workers over whatever link joins them; prints what was predicted and measured, as JSON.

Usage: two_hosts.py ADDRESS ADDRESS
"""

from __future__ import annotations

import json
import sys
import time

import keras
import numpy as np

import pipetrain
from pipetrain.frontend.layout import described

BATCH, STEPS, INPUTS, WIDTH, NARROW = 512, 40, 64, 1024, 32


class Clock(keras.callbacks.Callback):
    """When each step ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends_s: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.ends_s.append(time.perf_counter())


def main(addresses: list[str]) -> None:
    devices = pipetrain.connect(addresses)
    keras.utils.set_random_seed(0)
    # An even cut, between wide layers, sends much; the one after the narrow layer little. Computing takes most.
    layers = [keras.layers.Dense(WIDTH, "relu", name=f"wide_{n}") for n in range(7)]
    layers.insert(1, keras.layers.Dense(NARROW, "relu", name="narrow"))
    model = keras.Sequential([keras.Input((INPUTS,)), *layers, keras.layers.Dense(10, name="logits")])
    pm = pipetrain.PipelineModel(model, stages=2, scheme="vanilla", devices=devices)
    pm.compile(keras.optimizers.SGD(1e-3, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    partition = pm.partition(BATCH)
    x = np.random.default_rng(0).normal(size=(BATCH * STEPS, INPUTS)).astype("float32")
    clock = Clock()
    pm.fit(x, np.zeros(len(x), "int32"), batch_size=BATCH, verbose=0, callbacks=[clock])
    link = described(devices).link(0, 1)
    half = STEPS // 2
    print(
        json.dumps(
            {
                "bandwidth": link.bandwidth_bytes_per_s,
                "latency_s": link.latency_s,
                "call_s": described(devices).call_s,
                "cuts": partition.cuts,
                "predicted": partition.samples_per_second,
                "measured": BATCH * (STEPS - half) / (clock.ends_s[-1] - clock.ends_s[half - 1]),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
