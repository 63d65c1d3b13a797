"""Training that can be stopped at any moment and goes on.

    python examples/resume.py

Press Ctrl-C while it trains: the minibatches in flight are trained to their end, a checkpoint is written to
``runs/resume``, and the program ends. Run it again: it goes on after the last minibatch that it trained, in the middle
of an epoch too. A program that is killed (a power cut, no memory left) goes on from its last checkpoint, at most 100
steps back. When it has trained all epochs, running it again trains no more; delete ``runs/resume`` to begin anew.
"""

import sys
from pathlib import Path

import pipetrain
from pipetrain.cli.environment import start_tensorflow

start_tensorflow(2)  # quietly; without GPUs on so many logical CPU devices

from pipetrain.callbacks import PipelineCheckpoint

import keras
import numpy as np
from keras import layers

with np.load(Path(__file__).parents[1] / "experiments" / "data" / "fashion_mnist_small.npz") as data:
    x_train, y_train, x_test, y_test = (data[name] for name in ("x_train", "y_train", "x_test", "y_test"))

keras.utils.set_random_seed(0)  # so that every run has the data in the same order
model = keras.Sequential([keras.Input((28, 28)), layers.Rescaling(1 / 255), layers.Flatten()])
for _ in range(4):
    model.add(layers.Dense(512, activation="relu"))
model.add(layers.Dropout(0.2))
model.add(layers.Dense(10, activation="softmax"))

pm = pipetrain.PipelineModel(model, stages=2, scheme="spectrain")
pm.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
checkpoint = PipelineCheckpoint("runs/resume", every_steps=100)
try:
    pm.fit(x_train, y_train, batch_size=64, epochs=6, validation_data=(x_test, y_test), callbacks=[checkpoint])
except KeyboardInterrupt:  # the checkpoint has been written, and a line has said so
    sys.exit(130)
loss, accuracy = pm.evaluate(x_test, y_test, verbose=0)
print(f"\nAfter {pm.optimizer.iterations.numpy()} steps the validation accuracy is {accuracy:.3f}")
