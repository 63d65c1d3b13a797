"""A user's script for ``pipetrain launch``, which knows nothing of it.

Usage: launched.py OUTPUT [fail | kill | wait | resume | pause | three]
"""

from __future__ import annotations

import os
import signal
import sys
import time

import keras
import numpy as np

import pipetrain
from pipetrain.callbacks import PipelineCheckpoint

output, what = sys.argv[1], sys.argv[2:]
if what == ["kill"]:
    os.kill(os.getpid(), signal.SIGKILL)
keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(16, "relu", name=f"dense_{n}") for n in range(4)]
model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(3)])
pm = pipetrain.PipelineModel(model, cuts=["dense_0", "dense_1"] if what == ["three"] else ["dense_1"], scheme="1f1b")
pm.compile(keras.optimizers.SGD(0.1, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x = np.random.default_rng(0).normal(size=(320, 8)).astype("float32")
y = (x[:, 0] > 0).astype("int32")
if what == ["wait"]:
    print("waits", flush=True)
    time.sleep(600)
callbacks = [PipelineCheckpoint(f"{output}.checkpoints", every_steps=2)] if what == ["resume"] else []
if what == ["resume"]:
    # Slowly, so that a worker can be lost meanwhile.
    slow = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.1))
    callbacks.append(slow)
    print("trains", flush=True)
if what == ["pause"]:

    def pause(epoch, logs):
        print(f"trains epoch {epoch}", flush=True)
        while epoch and not os.path.exists(f"{output}.go"):
            time.sleep(0.1)

    callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=pause))
pm.fit(x, y, batch_size=32, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
model.save_weights(f"{output}.weights.h5")
print("done", flush=True)
if what == ["fail"]:
    raise RuntimeError("a mistake in the script")
