"""A Sequential model, trained as a pipeline of four stages.

    python examples/sequential.py

All of it is Keras but for ``PipelineModel``: at the first ``fit`` it measures the layers, cuts the model so that the
slowest stage is as fast as can be, and trains with several minibatches in flight. The stages go to the GPUs; without
one, to logical CPU devices.
"""

from pathlib import Path

import pipetrain
from pipetrain.cli.environment import start_tensorflow

start_tensorflow(4)  # quietly; without GPUs on so many logical CPU devices

import keras
import numpy as np
from keras import layers

with np.load(Path(__file__).parents[1] / "experiments" / "data" / "fashion_mnist_small.npz") as data:
    x_train, y_train, x_test, y_test = (data[name] for name in ("x_train", "y_train", "x_test", "y_test"))

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((28, 28)), layers.Rescaling(1 / 255), layers.Flatten()])
for _ in range(6):
    model.add(layers.Dense(256, activation="relu"))
model.add(layers.Dense(10, activation="softmax"))

pm = pipetrain.PipelineModel(model, stages=4, scheme="spectrain")
pm.compile(keras.optimizers.SGD(0.005, momentum=0.9), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
history = pm.fit(x_train, y_train, batch_size=128, epochs=5, validation_data=(x_test, y_test)).history
print(f"\nIt was cut so:\n{pm.partition(batch_size=128)}")
print(
    f"\nThe stages waited for {pm.trace.bubble():.0%} of the time; {history['val_accuracy'][-1]:.1%} of what they had"
)
print("not seen is told right.")
