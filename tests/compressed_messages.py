"""Trains with compressed messages; prints, as JSON, what a worker sent in a step, and what was planned.

``python compressed_messages.py NAMES ADDRESS ...``, the names in one argument, with commas between: compressions of
all-reduce's gradients, or ``SCHEME/COMPRESSION`` of what crosses the cut of a pipeline, of which both stages count.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

WIDTH, LAYERS, ROWS, STEPS = 1024, 4, 16, 8
CROSSING_ROWS = 1024
SENT = "/sys/class/net/eth0/statistics/tx_bytes"


def main(names, *addresses):
    import pipetrain

    devices = pipetrain.connect(addresses)
    import inside
    import keras
    import networks
    import tensorflow as tf

    from pipetrain.schemes.compression import compression_of
    from pipetrain.schemes.options import with_options

    class Sent(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            each = []
            for device in counted:
                with tf.device(device):
                    each.append(int(tf.io.read_file(SENT).numpy()))
            sent.append(sum(each))

    found = {}
    for name in names.split(","):
        scheme, _, compression = name.rpartition("/")
        counted, rows = (devices, CROSSING_ROWS) if scheme else (devices[:1], ROWS)
        layers = [keras.layers.Dense(WIDTH, "relu", name=f"d{n}") for n in range(LAYERS)]
        model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(5)])
        sent = []
        way, cut = pipetrain.AllReduce(order="layerwise", compression=compression), {}
        if scheme:
            way, cut = with_options(scheme, compression=compression), {"cuts": ("d1",)}
        pm = pipetrain.PipelineModel(model, scheme=way, devices=devices, **cut)
        pm.compile(keras.optimizers.SGD(0.001), networks.crossentropy(), jit_compile=False, steps_per_execution=1)
        x = np.random.default_rng(0).normal(size=(rows * STEPS, 2)).astype("float32")
        pm.fit(x, np.zeros(len(x)), batch_size=rows, verbose=0, callbacks=[Sent()])
        if scheme:
            planned = [2 * pm.partition(rows).stages[0].crossing_bytes(compression_of(compression))]
        else:
            planned = inside.strategy(pm)._gradient_bytes()
            planned = planned or [4 * int(np.prod(variable.shape)) for variable in model.trainable_variables]
        found[name] = {"planned": int(sum(planned)), "sent": np.diff(sent)[2:].tolist()}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
