"""A network of keras.applications, cut into two stages of about equal work.

    python examples/applications.py

A Sequential or Functional model is cut as it is. ``partition`` measures its layers and says where they are cut, what
each stage costs, and how many samples per second the pipeline trains at most. 27 of the network's 91 layers are
BatchNormalization; validation uses the statistics that the stages have gathered.
"""

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA reports whatever takes it a second to compile

import pipetrain
from pipetrain.cli.environment import start_tensorflow

start_tensorflow(2)  # quietly; without GPUs on so many logical CPU devices

import keras
import numpy as np


def coloured(pictures):
    """28 x 28 grey pixels as 32 x 32 x 3, which is what MobileNet reads."""
    pictures = np.pad(pictures.astype("float32"), ((0, 0), (2, 2), (2, 2)))
    return keras.applications.mobilenet.preprocess_input(np.stack([pictures] * 3, axis=-1))


with np.load(Path(__file__).parents[1] / "experiments" / "data" / "fashion_mnist_small.npz") as data:
    x_train, y_train = coloured(data["x_train"][:4000]), data["y_train"][:4000]
    x_test, y_test = coloured(data["x_test"][:1000]), data["y_test"][:1000]

keras.utils.set_random_seed(0)
model = keras.applications.MobileNet(
    input_shape=(32, 32, 3), alpha=0.25, weights=None, classes=10, classifier_activation=None
)
for layer in model.layers:
    if isinstance(layer, keras.layers.BatchNormalization):
        layer.momentum = 0.9  # for a short training: with 0.99 the statistics lag hundreds of steps behind

pm = pipetrain.PipelineModel(model, stages=2, scheme="spectrain")
print(pm.partition(batch_size=64))
pm.compile(
    keras.optimizers.SGD(0.02, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = pm.fit(x_train, y_train, batch_size=64, epochs=2, validation_data=(x_test, y_test)).history
print(f"\nValidation accuracy after two epochs: {history['val_accuracy'][-1]:.3f}")
