"""Networks of papers on the order of transfers: their layers' graph, and what a worker computes by a roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from pipetrain.plan.roofline import Device, roofline
from pipetrain.schemes.transfers.plan import Message, Workload
from pipetrain.simulation.profiled import workload_of

if TYPE_CHECKING:
    import keras

    from pipetrain.compute.graph.blocks import Chain

IMAGE, LARGE, CLASSES = (224, 224, 3), (299, 299, 3), 1000
IMAGENET_22K = 21841  # classes
# One of the two processors of a Tesla K80: 2496 cores in 13 multiprocessors at 824 MHz; NVIDIA's board specification.
TESLA_K80 = Device("half a Tesla K80", 4.11e12, 240e9, 13)
# A ninth of two Xeon X5570 (8 cores at 2.93 GHz, 8 operations a cycle, 64 GB/s): HP's data sheet of the BL460c G6.
NINTH_OF_BLADE = Device("a ninth of a BL460c G6", 188e9 / 9, 64e9 / 9, 1)

# Channels of GoogLeNet's blocks: 1x1; 1x1 before 3x3; 3x3; 1x1 before 5x5; 5x5; 1x1 after the pool. Table 1 of Szegedy
# et al. 2014 (arXiv 1409.4842). None: a pool between blocks.
INCEPTIONS = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


def alexnet() -> keras.Model:
    """AlexNet of one tower (Krizhevsky 2014, arXiv 1404.5997): 61 million parameters."""
    import keras

    conv, pool = _convolution, keras.layers.MaxPooling2D(3, 2)
    inputs = keras.Input(IMAGE)
    x = pool(conv(keras.layers.ZeroPadding2D(2)(inputs), 64, 11, strides=4, padding="valid"))
    x = keras.layers.MaxPooling2D(3, 2)(conv(x, 192, 5))
    for filters in (384, 256, 256):
        x = conv(x, filters, 3)
    x = keras.layers.Flatten()(keras.layers.MaxPooling2D(3, 2)(x))
    for _ in range(2):
        x = keras.layers.Dropout(0.5)(keras.layers.Dense(4096, activation="relu")(x))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x), name="alexnet")


def googlenet() -> keras.Model:
    """GoogLeNet, Inception v1, without its auxiliary classifiers: 7.0 million parameters."""
    import keras

    layers, conv = keras.layers, _convolution
    inputs = keras.Input(IMAGE)
    x = layers.MaxPooling2D(3, 2, padding="same")(conv(inputs, 64, 7, strides=2))
    x = layers.MaxPooling2D(3, 2, padding="same")(conv(conv(x, 64, 1), 192, 3))
    for channels in INCEPTIONS:
        if channels is None:
            x = layers.MaxPooling2D(3, 2, padding="same")(x)
            continue
        one, before_3, three, before_5, five, pooled = channels
        branches = [conv(x, one, 1), conv(conv(x, before_3, 1), three, 3), conv(conv(x, before_5, 1), five, 5)]
        branches.append(conv(layers.MaxPooling2D(3, 1, padding="same")(x), pooled, 1))
        x = layers.Concatenate()(branches)
    x = layers.Dropout(0.4)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(x), name="googlenet")


def _convolution(x: Any, filters: int, size: int, strides: int = 1, padding: str = "same") -> Any:
    import keras

    return keras.layers.Conv2D(filters, size, strides=strides, padding=padding, activation="relu")(x)


def _of_keras(name: str, shape: tuple[int, int, int] = IMAGE, classes: int = CLASSES) -> Callable[[], keras.Model]:
    def made() -> keras.Model:
        import keras

        found: keras.Model = getattr(keras.applications, name)(weights=None, input_shape=shape, classes=classes)
        return found

    return made


def _own(name: str, shape: tuple[int, int, int]) -> Callable[[], keras.Model]:
    def made() -> keras.Model:
        import models

        return models.build(name, shape, CLASSES)

    return made


NETWORKS: dict[str, Callable[[], keras.Model]] = {
    "alexnet": alexnet,
    "googlenet": googlenet,
    "inception_v3": _of_keras("InceptionV3", LARGE),
    "inception_v4": _own("inception_v4", LARGE),
    "resnet50": _of_keras("ResNet50"),
    "resnet101": _of_keras("ResNet101"),
    "resnet152": _of_keras("ResNet152"),
    "resnet50_v2": _of_keras("ResNet50V2"),
    "resnet101_v2": _of_keras("ResNet101V2"),
    "vgg16": _own("vgg16", IMAGE),
    "vgg19": _of_keras("VGG19"),
    "vgg19_22k": _of_keras("VGG19", classes=IMAGENET_22K),
    "xception": _of_keras("Xception", LARGE),
    "densenet121": _of_keras("DenseNet121"),
    "mobilenet_v2": _of_keras("MobileNetV2"),
    "efficientnet_b0": _of_keras("EfficientNetB0"),
}


@lru_cache(maxsize=1)  # of networks that have a thousand million bytes
def _chain(name: str) -> Chain:
    from pipetrain.compute.graph.blocks import Chain

    return Chain(NETWORKS[name]())


@cache
def after(name: str) -> tuple[tuple[int, ...], ...]:
    """For each block of a network the numbers of the blocks whose outputs it reads."""
    made_by, found = dict[int, int](), []
    for k, block in enumerate(_chain(name).blocks):
        reads = {made_by[each] for call in block.calls for each in call.reads if each in made_by}
        found.append(tuple(sorted(reads - {k})))
        made_by |= {value: k for call in block.calls for value in call.writes}
    return tuple(found)


@cache
def _worker(name: str, device: Device, rows: int) -> Workload:
    from pipetrain.compute.profiling.operation_count import estimated_counts

    made = workload_of(roofline(name, rows, estimated_counts(_chain(name), rows), device), 1, Message())
    pairs = zip(made.layers, after(name), strict=True)
    return replace(made, layers=tuple(replace(layer, after=reads) for layer, reads in pairs))


def workload(name: str, device: Device, rows: int, message: Message) -> Workload:
    """What a worker computes of its rows, with the layers' graph; a block's trained weights are one variable."""
    return replace(_worker(name, device, rows), message=message)


def computing_s(made: Workload) -> float:
    """Forward and backward."""
    return sum(layer.forward_s + layer.backward_s for layer in made.layers)
