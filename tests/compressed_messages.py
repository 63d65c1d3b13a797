"""Trains by all-reduce with compressed gradients; prints, as JSON, what a worker sent in a step, and what was planned.

``python compressed_messages.py COMPRESSIONS ADDRESS ...``, the compressions in one argument, with commas between.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

WIDTH, LAYERS, ROWS, STEPS = 1024, 4, 16, 8
SENT = "/sys/class/net/eth0/statistics/tx_bytes"


def main(compressions, *addresses):
    import pipetrain

    devices = pipetrain.connect(addresses)
    import inside
    import keras
    import networks
    import tensorflow as tf

    class Sent(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with tf.device(devices[0]):
                sent.append(int(tf.io.read_file(SENT).numpy()))

    found = {}
    for compression in compressions.split(","):
        layers = [keras.layers.Dense(WIDTH, "relu", name=f"d{n}") for n in range(LAYERS)]
        model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(5)])
        sent = []
        way = pipetrain.AllReduce(order="layerwise", compression=compression)
        pm = pipetrain.PipelineModel(model, scheme=way, devices=devices)
        pm.compile(keras.optimizers.SGD(0.001), networks.crossentropy())
        x = np.zeros((ROWS * STEPS, 2), "float32")
        pm.fit(x, np.zeros(len(x)), batch_size=ROWS, verbose=0, callbacks=[Sent()])
        planned = inside.strategy(pm)._gradient_bytes()
        planned = planned or [4 * int(np.prod(variable.shape)) for variable in model.trainable_variables]
        found[compression] = {"planned": int(sum(planned)), "sent": np.diff(sent)[2:].tolist()}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
