"""Data sets for the experiments: one embedded, the others through tensorflow-datasets."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

EMBEDDED = Path(__file__).parent / "data" / "fashion_mnist_small.npz"
TFDS = ("fashion_mnist", "cifar10", "imdb_reviews")
NAMES = ("fashion_mnist_small", *TFDS)
VOCABULARY = 2000
READ_ROWS = 4096  # at a time


class Dataset(NamedTuple):
    """Features of shape (rows, ...) with zero mean and unit variance, and integer labels of shape (rows,)."""

    name: str
    classes: int
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load(name: str, data_dir: str | None = None) -> Dataset:
    """The data set ``name``: features standardized with the training set's mean and deviation.

    Reviews become vectors that say which of the most frequent words they have. Data sets other than the embedded
    one are looked for in ``data_dir`` (tensorflow-datasets' own folder by default) and downloaded there if need be.

    Raises ValueError for an unknown name, and for data that are missing or damaged.
    """
    if name not in NAMES:
        raise ValueError(f"Unknown data set. Received: dataset={name!r}. Try one of: {', '.join(NAMES)}.")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ValueError(f"There is no such directory. Received: data-dir={data_dir!r}. Try one that holds {name}.")
    if name in TFDS:
        (x_train, y_train), (x_test, y_test) = _from_tfds(name, data_dir)
    else:
        with np.load(EMBEDDED) as arrays:
            x_train, y_train, x_test, y_test = (arrays[key] for key in ("x_train", "y_train", "x_test", "y_test"))
    if x_train.dtype == object:
        x_train, x_test = _words(x_train, x_test)
    x_train, x_test = x_train.astype("float32"), x_test.astype("float32")
    mean, deviation = x_train.mean(dtype="float64"), x_train.std(dtype="float64")
    classes = int(y_train.max()) + 1
    standard = [((x - mean) / deviation).astype("float32") for x in (x_train, x_test)]
    return Dataset(name, classes, standard[0], y_train.astype("int32"), standard[1], y_test.astype("int32"))


def _from_tfds(name: str, data_dir: str | None) -> list[tuple[np.ndarray, np.ndarray]]:
    import tensorflow_datasets as tfds

    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it announces every retry of a download
    try:
        parts = tfds.load(name, split=["train", "test"], data_dir=data_dir, as_supervised=True)
        return [_arrays(tfds.as_numpy(part.batch(READ_ROWS))) for part in parts]
    except Exception as error:  # of many kinds: no network, a truncated file, a checksum
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(
            f"Cannot read the data set: {type(error).__name__}: {reason}. Received: dataset={name!r}, "
            f"data-dir={data_dir!r}. Try a directory where tensorflow-datasets prepared it, or delete a damaged copy."
        ) from error


def _arrays(batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    features, labels = zip(*batches, strict=True)
    return np.concatenate(features), np.concatenate(labels)


def _words(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import keras

    vectors = keras.layers.TextVectorization(max_tokens=VOCABULARY, output_mode="multi_hot")
    vectors.adapt(train)
    return tuple(
        np.concatenate([vectors(part).numpy() for part in np.array_split(texts, 50)]) for texts in (train, test)
    )
