"""Inception v4: a stem and three kinds of blocks of parallel convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

L = keras.layers
Size = int | tuple[int, int]


def inception_v4(input_shape: tuple[int, ...], classes: int, depth: int = 7, width: int = 32) -> keras.Model:
    """Stem, 4 blocks A, reduction, 7 blocks B, reduction, 3 blocks C, the mean over the image, dropout, logits.

    Every convolution has batch normalization and ReLU, and no bias. Source: Szegedy et al. 2016 (arXiv 1602.07261),
    figures 3 to 9; 42,679,816 trainable parameters at 1000 classes and 299 x 299.

    Args:
        input_shape: rows, columns and channels of one image, 75 x 75 at least.
        classes: number of logits.
        depth: blocks B; there are 4/7 as many blocks A and 3/7 as many blocks C.
        width: channels of the first convolution; all others grow and shrink with it.
    """
    net = _Network(width / 32)
    inputs = keras.Input(input_shape)
    x = net.stem(inputs)
    for n in range(max(1, round(depth * 4 / 7))):
        x = net.block_a(x, f"a{n + 1}")
    x = net.reduction_a(x)
    for n in range(depth):
        x = net.block_b(x, f"b{n + 1}")
    x = net.reduction_b(x)
    for n in range(max(1, round(depth * 3 / 7))):
        x = net.block_c(x, f"c{n + 1}")
    x = L.Dropout(0.2, name="dropout")(L.GlobalAveragePooling2D(name="mean")(x))
    return keras.Model(inputs, L.Dense(classes, name="logits")(x), name="inception_v4")


class _Network:
    """The parts of the network, their channels multiplied by ``scale``."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def stem(self, x: Any) -> Any:
        x = self.convolution(x, 32, 3, "stem_1", 2, "valid")
        x = self.convolution(x, 32, 3, "stem_2", 1, "valid")
        x = self.convolution(x, 64, 3, "stem_3")
        x = _joined(_pool(x, "stem_4_pool"), self.convolution(x, 96, 3, "stem_4", 2, "valid"), name="stem_4_join")
        a = self.convolution(self.convolution(x, 64, 1, "stem_5a_1"), 96, 3, "stem_5a_2", 1, "valid")
        b = self.convolutions(x, [(64, 1), (64, (7, 1)), (64, (1, 7))], "stem_5b")
        x = _joined(a, self.convolution(b, 96, 3, "stem_5b_4", 1, "valid"), name="stem_5_join")
        return _joined(self.convolution(x, 192, 3, "stem_6", 2, "valid"), _pool(x, "stem_6_pool"), name="stem_6_join")

    def block_a(self, x: Any, name: str) -> Any:
        return _joined(
            self.pooled(x, 96, name),
            self.convolution(x, 96, 1, f"{name}_single"),
            self.convolutions(x, [(64, 1), (96, 3)], f"{name}_double"),
            self.convolutions(x, [(64, 1), (96, 3), (96, 3)], f"{name}_triple"),
            name=f"{name}_join",
        )

    def reduction_a(self, x: Any) -> Any:
        deep = self.convolutions(x, [(192, 1), (224, 3)], "reduce_a_deep")
        return _joined(
            _pool(x, "reduce_a_pool"),
            self.convolution(x, 384, 3, "reduce_a", 2, "valid"),
            self.convolution(deep, 256, 3, "reduce_a_deep_3", 2, "valid"),
            name="reduce_a_join",
        )

    def block_b(self, x: Any, name: str) -> Any:
        return _joined(
            self.pooled(x, 128, name),
            self.convolution(x, 384, 1, f"{name}_single"),
            self.convolutions(x, [(192, 1), (224, (1, 7)), (256, (7, 1))], f"{name}_double"),
            self.convolutions(
                x, [(192, 1), (192, (1, 7)), (224, (7, 1)), (224, (1, 7)), (256, (7, 1))], f"{name}_quadruple"
            ),
            name=f"{name}_join",
        )

    def reduction_b(self, x: Any) -> Any:
        wide = self.convolution(x, 192, 1, "reduce_b_wide_1")
        deep = self.convolutions(x, [(256, 1), (256, (1, 7)), (320, (7, 1))], "reduce_b_deep")
        return _joined(
            _pool(x, "reduce_b_pool"),
            self.convolution(wide, 192, 3, "reduce_b_wide_2", 2, "valid"),
            self.convolution(deep, 320, 3, "reduce_b_deep_4", 2, "valid"),
            name="reduce_b_join",
        )

    def block_c(self, x: Any, name: str) -> Any:
        fork = self.convolution(x, 384, 1, f"{name}_fork")
        deep = self.convolutions(x, [(384, 1), (448, (1, 3)), (512, (3, 1))], f"{name}_deep")
        return _joined(
            self.pooled(x, 256, name),
            self.convolution(x, 256, 1, f"{name}_single"),
            self.convolution(fork, 256, (1, 3), f"{name}_fork_across"),
            self.convolution(fork, 256, (3, 1), f"{name}_fork_down"),
            self.convolution(deep, 256, (3, 1), f"{name}_deep_down"),
            self.convolution(deep, 256, (1, 3), f"{name}_deep_across"),
            name=f"{name}_join",
        )

    def pooled(self, x: Any, channels: int, name: str) -> Any:
        x = L.AveragePooling2D(3, 1, padding="same", name=f"{name}_pool")(x)
        return self.convolution(x, channels, 1, f"{name}_pooled")

    def convolutions(self, x: Any, parts: Sequence[tuple[int, Size]], name: str) -> Any:
        for n, (channels, size) in enumerate(parts, start=1):
            x = self.convolution(x, channels, size, f"{name}_{n}")
        return x

    def convolution(self, x: Any, channels: int, size: Size, name: str, stride: int = 1, padding: str = "same") -> Any:
        scaled = max(1, round(channels * self._scale))
        x = L.Conv2D(scaled, size, stride, padding=padding, use_bias=False, name=f"{name}_conv")(x)
        return L.ReLU(name=f"{name}_relu")(L.BatchNormalization(epsilon=1e-3, name=f"{name}_norm")(x))


def _pool(x: Any, name: str) -> Any:
    return L.MaxPooling2D(3, 2, name=name)(x)


def _joined(*branches: Any, name: str) -> Any:
    return L.Concatenate(name=name)(list(branches))
