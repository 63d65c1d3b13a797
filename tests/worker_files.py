"""Trains on files that only the workers have; prints, as JSON, what this process sent in each step and how it trained.

``python worker_files.py SCHEME NETWORK FOLDER ADDRESS ...``: in the folder every worker has what ``write`` wrote there,
this process nothing. ``python worker_files.py --write FOLDER WORKER READERS`` writes, for the first workers, which
read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

WIDTH, STEPS, BATCH = 1024, 20, 64  # of the minibatches of all workers together
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def rows():
    generator = np.random.default_rng(0)
    return generator.normal(size=(STEPS * BATCH, WIDTH)).astype("float32"), generator.integers(5, size=STEPS * BATCH)


def write(folder, worker, readers):
    """This worker's rows of every minibatch, each minibatch a file."""
    x, y = rows()
    for step in range(STEPS) if worker < readers else ():
        name = f"{folder}/{step:03}"
        mine = np.arange(len(x)).reshape(STEPS, readers, -1)[step, worker]
        Path(f"{name}.x").write_bytes(x[mine].tobytes())
        Path(f"{name}.y").write_bytes(y[mine].astype("int32").tobytes())


def dense():
    import keras

    layers = [keras.layers.Dense(16, "tanh", name=f"d{n}") for n in range(3)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(5)])


def residual():
    """As many variables as a ResNet50 without biases: 161 weights, and 106 statistics that layers keep."""
    import keras

    x = keras.Input((WIDTH,))
    y = keras.layers.Dense(16, use_bias=False)(x)
    for _ in range(53):
        z = keras.layers.Dense(16, use_bias=False)(y)
        z = keras.layers.BatchNormalization()(z)
        y = keras.layers.Add()([y, keras.layers.ReLU()(z)])
    return keras.Model(x, keras.layers.Dense(5)(y))


NETWORKS = {"dense": dense, "residual": residual}


def main(scheme, network, folder, *addresses):
    import pipetrain

    devices = pipetrain.connect(addresses)
    import keras
    import networks
    import tensorflow as tf

    class Sent(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            sent.append(int(SENT.read_text()))

        def on_epoch_end(self, epoch, logs=None):
            self.model.get_weights()

    def decoded(name):
        x = tf.io.decode_raw(tf.io.read_file(name), tf.float32)
        y = tf.io.decode_raw(tf.io.read_file(tf.strings.regex_replace(name, "x$", "y")), tf.int32)
        return tf.reshape(x, [-1, WIDTH]), y

    def read(worker, workers):
        return tf.data.Dataset.list_files(f"{folder}/*.x", shuffle=False).map(decoded)

    assert not [*Path(folder).glob("*")]
    found = {}
    for name, data in {
        "data": {"x": pipetrain.data(read)},
        "arrays": dict(zip("xy", rows()), batch_size=BATCH),
    }.items():
        keras.utils.set_random_seed(0)
        model = NETWORKS[network]()
        sent = []
        pm = networks.in_way(model, 2, scheme, devices=devices)
        pm.compile(keras.optimizers.SGD(1e-3, momentum=0.9), networks.crossentropy())
        history = pm.fit(**data, epochs=2, shuffle=False, verbose=0, callbacks=[Sent()]).history
        found[name] = {"loss": history["loss"], "weights": [each.tolist() for each in pm.get_weights()]}
        found[name]["sent"] = np.diff(sent).tolist()
    equal = found["data"].pop("weights") == found["arrays"].pop("weights")
    print(json.dumps({**found, "equal": equal}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main(*sys.argv[1:])
