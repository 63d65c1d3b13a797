"""Trains by all-reduce that sends less; prints, as JSON, what a worker sent in a step, and what was planned.

``python compressed_messages.py OPTION NAMES ADDRESS ...``: of ``compression`` or ``topology`` the names in one
argument, with commas between.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

WIDTH, LAYERS, ROWS, STEPS = 1024, 4, 16, 8
SENT = "/sys/class/net/eth0/statistics/tx_bytes"


def main(option, names, *addresses):
    import pipetrain

    devices = pipetrain.connect(addresses)
    import inside
    import keras
    import networks
    import tensorflow as tf

    from pipetrain.schemes.synchrony import topology_of
    from pipetrain.simulation.profiled import sent_times

    class Sent(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with tf.device(devices[0]):
                sent.append(int(tf.io.read_file(SENT).numpy()))

    found = {}
    for name in names.split(","):
        layers = [keras.layers.Dense(WIDTH, "relu", name=f"d{n}") for n in range(LAYERS)]
        model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(5)])
        sent = []
        way = pipetrain.AllReduce(order="layerwise", **{option: name})
        pm = pipetrain.PipelineModel(model, scheme=way, devices=devices)
        pm.compile(keras.optimizers.SGD(0.001), networks.crossentropy())
        x = np.zeros((ROWS * STEPS, 2), "float32")
        pm.fit(x, np.zeros(len(x)), batch_size=ROWS, verbose=0, callbacks=[Sent()])
        planned = inside.strategy(pm)._gradient_bytes()
        if planned is None:
            times, _ = sent_times(len(devices), topology_of(way.topology))
            planned = [times * 4 * int(np.prod(variable.shape)) for variable in model.trainable_variables]
        found[name] = {"planned": int(sum(planned)), "sent": np.diff(sent)[2:].tolist()}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
