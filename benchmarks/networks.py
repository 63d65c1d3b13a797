"""The networks that benchmarks train: models of ``models``, and a dense one, small enough for two cores."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import keras
    import numpy as np

CLASSES, WORDS = 10, 1000  # of the made-up labels and sentences


class Network(NamedTuple):
    """A network of ``models``, or a stack of dense layers where it has no such name, and what it reads.

    ``classes`` are what it tells apart; for gpt2 they are the words that it reads and predicts, one for each position.
    """

    name: str
    input_shape: tuple[int, ...]
    batch_size: int
    size: dict[str, int]
    classes: int = CLASSES


NETWORKS = {
    "dense": Network("dense", (1024,), 128, {"depth": 8, "width": 1024}),
    "snn": Network("snn", (784,), 128, {"depth": 32, "width": 512}),
    "vgg16": Network("vgg16", (32, 32, 3), 64, {"width": 16}),
    "resnet": Network("resnet152", (32, 32, 3), 64, {"depth": 50, "width": 16}),
    "inception_v4": Network("inception_v4", (75, 75, 3), 16, {"width": 8}),
    "transformer": Network("transformer", (20,), 64, {"depth": 3, "width": 128}),
    "residual_lstm": Network("residual_lstm", (20,), 64, {"depth": 4, "width": 256}),
    "gpt2": Network("gpt2", (64,), 16, {"depth": 12, "width": 256}, 8000),
}
# Smaller still where the above take long, and with no more words than are read: all gradients of PyTorch's embeddings
# are dense, and those of rows never read would take most of its time.
COMPARED = {
    "dense": NETWORKS["dense"],
    "snn": NETWORKS["snn"],
    "vgg16": NETWORKS["vgg16"],
    "resnet": Network("resnet152", (32, 32, 3), 32, {"depth": 26, "width": 16}),
    "transformer": Network("transformer", (20,), 64, {"depth": 3, "width": 128, "vocabulary": WORDS}),
    "residual_lstm": Network("residual_lstm", (20,), 64, {"depth": 4, "width": 256, "vocabulary": WORDS}),
}


def build(network: Network) -> keras.Model:
    """The network."""
    import keras

    import models

    if network.name != "dense":
        return models.build(network.name, network.input_shape, network.classes, **network.size)
    layers = [keras.layers.Dense(network.size["width"], activation="relu") for _ in range(network.size["depth"])]
    return keras.Sequential([keras.Input(network.input_shape), *layers, keras.layers.Dense(network.classes)])


def data(network: Network, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Random rows of what the network reads, and labels."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (rows, *network.input_shape)
    words, every_position = network.name in ("transformer", "residual_lstm", "gpt2"), network.name == "gpt2"
    x = rng.integers(0, WORDS, shape).astype("int32") if words else rng.normal(size=shape).astype("float32")
    return x, rng.integers(0, network.classes, shape if every_position else rows).astype("int32")
