"""VGG16: thirteen 3x3 convolutions in five blocks and three dense layers."""

from __future__ import annotations

import keras

L = keras.layers
CONVOLUTIONS = (2, 2, 3, 3, 3)  # of each block


def vgg16(input_shape: tuple[int, ...], classes: int, width: int = 64) -> keras.Model:
    """13 convolutions of ``width`` to ``8 * width`` channels, two dense layers of ``64 * width`` units, and logits.

    As published, each dense layer is followed by dropout of one half. Source: Simonyan and Zisserman 2014
    (arXiv 1409.1556), configuration D.

    Args:
        input_shape: rows, columns and channels of one image, 32 x 32 at least.
        classes: number of logits.
        width: channels of the first block.
    """
    inputs = x = keras.Input(input_shape)
    for block, count in enumerate(CONVOLUTIONS, start=1):
        channels = width * min(2 ** (block - 1), 8)
        for n in range(1, count + 1):
            name = f"block{block}_conv{n}"
            initial = "he_normal"
            x = L.Conv2D(channels, 3, padding="same", activation="relu", kernel_initializer=initial, name=name)(x)
        x = L.MaxPooling2D(name=f"block{block}_pool")(x)
    x = L.Flatten(name="flatten")(x)
    for n in (1, 2):
        x = L.Dense(64 * width, activation="relu", kernel_initializer="he_normal", name=f"dense_{n}")(x)
        x = L.Dropout(0.5, name=f"dropout_{n}")(x)
    return keras.Model(inputs, L.Dense(classes, name="logits")(x), name="vgg16")
