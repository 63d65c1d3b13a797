"""ResNet-152: bottleneck blocks with skip connections and batch normalization."""

from __future__ import annotations

from typing import Any

import keras

L = keras.layers
BLOCKS = {152: (3, 8, 36, 3), 101: (3, 4, 23, 3), 50: (3, 4, 6, 3), 26: (2, 2, 2, 2), 14: (1, 1, 1, 1)}
SMALL = 64  # images narrower than this keep their resolution in the stem


def resnet152(input_shape: tuple[int, ...], classes: int, depth: int = 152, width: int = 64) -> keras.Model:
    """Four groups of bottleneck blocks, 3 + 8 + 36 + 3 of them, then the mean over the image and logits.

    The stride is in a block's 3 x 3 convolution. Images under 64 pixels enter through a 3 x 3 convolution instead of
    the 7 x 7 one with stride and pooling. Source: He et al. 2015 (arXiv 1512.03385).

    Args:
        input_shape: rows, columns and channels of one image.
        classes: number of logits.
        depth: layers with weights: 152, or 101, 50, 26 or 14. Raises ValueError for others.
        width: channels of the first convolution.
    """
    if depth not in BLOCKS:
        raise ValueError(f"No such depth. Received: depth={depth}. Try one of: {', '.join(map(str, sorted(BLOCKS)))}.")
    inputs = keras.Input(input_shape)
    if min(input_shape[:2]) < SMALL:
        x = _convolution(inputs, width, 3, 1, "stem")
    else:
        x = L.MaxPooling2D(3, 2, padding="same", name="stem_pool")(_convolution(inputs, width, 7, 2, "stem"))
    for group, count in enumerate(BLOCKS[depth]):
        for n in range(count):
            stride = 2 if n == 0 and group > 0 else 1
            x = _bottleneck(x, width * 2**group, stride, f"group{group + 1}_block{n + 1}", project=n == 0)
    x = L.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(inputs, L.Dense(classes, name="logits")(x), name=f"resnet{depth}")


def _bottleneck(x: Any, channels: int, stride: int, name: str, project: bool) -> Any:
    y = _convolution(x, channels, 1, 1, f"{name}_1")
    y = _convolution(y, channels, 3, stride, f"{name}_2")
    y = _convolution(y, 4 * channels, 1, 1, f"{name}_3", activation=False)
    skip = _convolution(x, 4 * channels, 1, stride, f"{name}_skip", activation=False) if project else x
    return L.ReLU(name=f"{name}_out")(L.Add(name=f"{name}_add")([skip, y]))


def _convolution(x: Any, channels: int, size: int, stride: int, name: str, activation: bool = True) -> Any:
    initial = "he_normal"
    x = L.Conv2D(
        channels, size, stride, padding="same", use_bias=False, kernel_initializer=initial, name=f"{name}_conv"
    )(x)
    x = L.BatchNormalization(epsilon=1e-5, name=f"{name}_norm")(x)
    return L.ReLU(name=f"{name}_relu")(x) if activation else x
