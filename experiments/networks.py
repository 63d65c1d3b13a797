"""What an experiment does by default with each network: the paper's learning rate, and data that suit it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import NamedTuple

import models


class Network(NamedTuple):
    """Defaults for one network: learning rate, data set, what it reads, and its size.

    ``reads`` is ``"features"`` (any shape), ``"images"`` (of ``image_size`` pixels a side, three channels), ``"words"``
    (numbered, of short sentences) or ``"next words"`` (the same, labelled by the words that follow).
    """

    learning_rate: float
    dataset: str
    reads: str
    image_size: int = 0
    size: Mapping[str, int] = {}


# Learning rates: Chen et al. 2018 (arXiv 1809.02839), section 4; those of language models suit SGD with momentum.
NETWORKS = {
    "snn": Network(1e-3, "fashion_mnist_small", "features", size={"depth": 16, "width": 512}),
    "vgg16": Network(2e-3, "cifar10", "images", 32),
    "resnet152": Network(2e-2, "cifar10", "images", 32),
    "inception_v4": Network(1e-3, "cifar10", "images", 75),
    "transformer": Network(5e-5, "imdb_reviews", "words"),
    "residual_lstm": Network(5e-3, "imdb_reviews", "words"),
    "gpt2": Network(1e-2, "imdb_reviews", "next words"),
    "llama": Network(1e-2, "imdb_reviews", "next words"),
}
LANGUAGE = tuple(name for name, network in NETWORKS.items() if network.reads == "next words")
PUBLISHED = tuple(name for name in NETWORKS if name not in LANGUAGE)  # the six networks of the paper


def defaults(field: str) -> str:
    """For people: every network's default."""
    return ", ".join(f"{name} {getattr(network, field)}" for name, network in NETWORKS.items())


def parameters(name: str) -> set[str]:
    """What the size of a network may be given as."""
    return set(inspect.signature(models.function(name)).parameters)


def sizes(name: str, given: Mapping[str, int | None], published: bool = False) -> dict[str, int]:
    """The size arguments for a network, what is given before its defaults, or before what was ``published``.

    Raises ValueError for one it lacks.
    """
    chosen = {key: value for key, value in given.items() if value is not None}
    for key, value in chosen.items():
        if key not in parameters(name):
            raise ValueError(f"{name} has no {key}. Received: {key}={value}. Try without it.")
    return {**({} if published else NETWORKS[name].size), **chosen}


def input_shape(name: str, example: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what the network reads, for examples of this shape."""
    network = NETWORKS[name]
    return (network.image_size, network.image_size, 3) if network.reads == "images" else example
