"""Skip connections, two outputs with two losses, cuts by name, and Keras' callbacks.

    python examples/skips.py

A small U-Net reads noisy pictures of clothes, cleans them and says what they show. Two skips begin in one stage and
end in a later one. ``cuts`` names the last layer of every stage but the final one, in the order in which the layers
were made; what crosses a cut is found by itself. EarlyStopping and ReduceLROnPlateau are Keras' own.
"""

from pathlib import Path

import pipetrain
from pipetrain.cli.environment import start_tensorflow

start_tensorflow(3)  # quietly; without GPUs on so many logical CPU devices

import keras
import numpy as np
from keras import layers
from keras.callbacks import EarlyStopping, ReduceLROnPlateau

keras.utils.set_random_seed(0)
with np.load(Path(__file__).parents[1] / "experiments" / "data" / "fashion_mnist_small.npz") as data:
    clean = data["x_train"][:4000, ..., None] / np.float32(255)
    clean_test = data["x_test"][:1000, ..., None] / np.float32(255)
    labels, labels_test = data["y_train"][:4000], data["y_test"][:1000]
noisy, noisy_test = (x + np.random.normal(0, 0.3, x.shape).astype("float32") for x in (clean, clean_test))

inputs = keras.Input((28, 28, 1))
fine = layers.Conv2D(8, 3, padding="same", activation="relu", name="fine")(inputs)
coarse = layers.Conv2D(16, 3, strides=2, padding="same", activation="relu", name="coarse")(fine)
x = layers.Conv2D(32, 3, strides=2, padding="same", activation="relu", name="bottom")(coarse)
label = layers.Dense(10, activation="softmax", name="label")(layers.Flatten()(x))
x = layers.Concatenate(name="join_coarse")([layers.UpSampling2D()(x), coarse])
x = layers.Conv2D(16, 3, padding="same", activation="relu", name="up_coarse")(x)
x = layers.Concatenate(name="join_fine")([layers.UpSampling2D()(x), fine])
x = layers.Conv2D(8, 3, padding="same", activation="relu", name="up_fine")(x)
picture = layers.Conv2D(1, 3, padding="same", activation="sigmoid", name="picture")(x)
model = keras.Model(inputs, {"label": label, "picture": picture}, name="unet")

pm = pipetrain.PipelineModel(model, cuts=("coarse", "up_coarse"), scheme="spectrain")
pm.compile(
    keras.optimizers.SGD(0.02, momentum=0.9),
    loss={"label": "sparse_categorical_crossentropy", "picture": "mse"},
    loss_weights={"label": 1, "picture": 10},
    metrics={"label": "accuracy"},
)
stopping = EarlyStopping("val_label_accuracy", mode="max", patience=1, restore_best_weights=True, verbose=1)
slowing = ReduceLROnPlateau("val_loss", factor=0.5, patience=1, verbose=1)
pm.fit(
    noisy,
    {"label": labels, "picture": clean},
    batch_size=64,
    epochs=6,
    validation_data=(noisy_test, {"label": labels_test, "picture": clean_test}),
    callbacks=[stopping, slowing],
    verbose=2,  # a line for each epoch: so many figures are wider than a terminal, where Keras' bar repeats itself
)

best = pm.evaluate(noisy_test, {"label": labels_test, "picture": clean_test}, verbose=0, return_dict=True)
print(f"\nThe best epoch's weights: validation accuracy {best['label_accuracy']:.3f}")
print(f"Mean squared noise of a picture: {np.mean((noisy_test - clean_test) ** 2):.3f}, ", end="")
print(f"cleaned: {best['picture_loss']:.3f}")
