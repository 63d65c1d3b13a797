"""Training on files that only the workers have, each its own; ``pipetrain launch`` starts the workers.

    pipetrain launch --local 2 examples/worker_files.py

To try it on one machine, the workers' files are written here first, into ``runs/worker_files``: one folder for each. On
several hosts each has its files already, and no others.
"""

from pathlib import Path

import pipetrain

import keras
import numpy as np
import tensorflow as tf
from keras import layers

FOLDER = Path("runs/worker_files").absolute()

with np.load(Path(__file__).parents[1] / "experiments" / "data" / "fashion_mnist_small.npz") as data:
    x_train, y_train, x_test, y_test = (data[name] for name in ("x_train", "y_train", "x_test", "y_test"))
for worker in range(2):
    (FOLDER / str(worker)).mkdir(parents=True, exist_ok=True)
    for n, (x, y) in enumerate(zip(np.split(x_train[worker::2], 10), np.split(y_train[worker::2], 10), strict=True)):
        rows = np.concatenate([x.reshape(len(x), -1), y[:, None]], 1).astype("uint8")
        (FOLDER / str(worker) / f"{n}.rows").write_bytes(rows.tobytes())

model = keras.Sequential([keras.Input((784,)), layers.Rescaling(1 / 255), layers.Dense(256, activation="relu")])
model.add(layers.Dense(10, activation="softmax"))
# With scheme="all-reduce" orders of transfers are tried before the first step, which takes half a minute.
pm = pipetrain.PipelineModel(model, scheme=pipetrain.AllReduce(order="none"))
pm.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])


# --8<-- [start:data]
def read(worker, workers):
    """What a worker reads: its rows of every minibatch."""

    def decoded(record):
        row = tf.io.decode_raw(record, tf.uint8)
        return tf.cast(row[:784], tf.float32), row[784]

    files = tf.data.Dataset.list_files(f"{FOLDER}/{worker}/*.rows", shuffle=False)
    rows = tf.data.FixedLengthRecordDataset(files, 785).map(decoded)
    return rows.shuffle(10_000, seed=worker).batch(128 // workers, drop_remainder=True)


pm.fit(pipetrain.data(read), epochs=3, shuffle=False, validation_data=(x_test.reshape(-1, 784), y_test))
# --8<-- [end:data]
