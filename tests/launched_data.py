"""A script for ``pipetrain launch`` whose data the workers read. Usage: launched_data.py OUTPUT SCHEME [resume]"""

from __future__ import annotations

import sys
import time

import keras
import tensorflow as tf

import pipetrain
from pipetrain.callbacks import PipelineCheckpoint

output, scheme, *what = sys.argv[1:]
keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(16, "relu", name="first"), keras.layers.BatchNormalization()]
layers += [keras.layers.Dropout(0.2, seed=1), keras.layers.Dense(16, "relu", name="third"), keras.layers.Dense(3)]
model = keras.Sequential([keras.Input((8,)), *layers])
if scheme == "1f1b":
    pm = pipetrain.PipelineModel(model, cuts=["third"], scheme=scheme)
else:  # in an order that is not found by trials, which would take long
    made = pipetrain.AllReduce if scheme == "all-reduce" else pipetrain.ParameterServer
    pm = pipetrain.PipelineModel(model, scheme=made(order="layerwise"))
pm.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def read(worker, workers):
    def row(n):
        angles = tf.cast(n[:, None], tf.float32) * tf.range(1.0, 9.0)
        return tf.sin(angles), tf.cast(n % 3, tf.int32)

    mine = tf.data.Dataset.range(320).shard(workers, worker)
    return mine.shuffle(40, seed=worker).batch(32 // workers).map(row)


callbacks = []
if what == ["resume"]:
    # Slowly, so that a worker can be lost meanwhile.
    slow = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.1))
    callbacks += [PipelineCheckpoint(f"{output}.checkpoints", every_steps=2), slow]
    print("trains", flush=True)
pm.fit(pipetrain.data(read), epochs=3, verbose=0, callbacks=callbacks)
model.save_weights(f"{output}.weights.h5")
print("done", flush=True)
