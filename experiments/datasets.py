"""Data sets for the experiments: one embedded, the others through tensorflow-datasets."""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipetrain.compute.profiling.limits import folder

EMBEDDED = Path(__file__).parent / "data" / "fashion_mnist_small.npz"
TFDS = ("fashion_mnist", "cifar10", "imdb_reviews")
NAMES = ("fashion_mnist_small", *TFDS)
FREQUENT = 2000  # words, where a review is a vector that says which of them it has
WORDS = 20  # of a review, where it is a sentence
VOCABULARY = 20_000  # distinct words of sentences
NEXT_WORDS = 8_000  # distinct words where the next one is predicted
UNKNOWN = 1  # the number of a word that is not among them
READ_ROWS = 4096  # at a time


class Dataset(NamedTuple):
    """Examples of shape (rows, ...) and integer labels of shape (rows,), or (rows, words) where words are predicted.

    Features and images have zero mean and unit variance; words are numbers below ``VOCABULARY``, 0 past the end.
    """

    name: str
    classes: int
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load(name: str, data_dir: str | None = None, reads: str = "features") -> Dataset:
    """The data set ``name``, standardized with the training set's mean and deviation.

    ``reads`` says what is wanted of it: ``"images"``; ``"words"``, the first of every review; ``"next words"``, the
    same, each labelled by the one that follows; or ``"features"``, which images are, and which reviews become as
    vectors that say which of the most frequent words they have. Data sets other than the embedded one are looked for in
    ``data_dir`` (tensorflow-datasets' own folder by default) and downloaded there if need be.

    Raises ValueError for an unknown name, for data that are missing or damaged, and for images where words are wanted
    or the reverse.
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
    text = x_train.dtype == object
    if (reads in ("words", "next words")) != text and reads != "features":
        suited = "imdb_reviews" if reads != "images" else "fashion_mnist_small or cifar10"
        raise ValueError(f"This network reads {reads}. Received: dataset={name!r}. Try {suited}.")
    classes = int(y_train.max()) + 1
    if reads == "words":
        return Dataset(name, classes, *_sentences(x_train, x_test, y_train, y_test))
    if reads == "next words":
        train, _, test, _ = _sentences(x_train, x_test, y_train, y_test)
        train, test = (np.where(each < NEXT_WORDS, each, UNKNOWN) for each in (train, test))
        return Dataset(name, NEXT_WORDS, train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:])
    if text:
        x_train, x_test = _vectors(x_train, x_test)
    x_train, x_test = x_train.astype("float32"), x_test.astype("float32")
    mean, deviation = x_train.mean(dtype="float64"), x_train.std(dtype="float64")
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


def _vectors(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import keras

    vectors = keras.layers.TextVectorization(max_tokens=FREQUENT, output_mode="multi_hot")
    vectors.adapt(train)
    return _in_parts(vectors, train), _in_parts(vectors, test)


def _sentences(
    train: np.ndarray, test: np.ndarray, y_train: np.ndarray, y_test: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Reviews as the numbers of their first words, made once and then read from the cache."""
    digest = hashlib.sha256(f"{WORDS} {VOCABULARY}".encode())
    for text in (*train, *test):
        digest.update(text)
    cache = folder()
    path = cache / f"words-{digest.hexdigest()[:32]}.npz"
    try:
        with np.load(path) as arrays:
            x_train, x_test = arrays["x_train"], arrays["x_test"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):  # not there, or not whole
        x_train, x_test = _numbered(train, test)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            part = cache / f"{path.stem}.{os.getpid()}.npz"
            try:
                np.savez_compressed(part, x_train=x_train, x_test=x_test)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        except OSError:
            pass  # a cache that cannot be written is no reason not to train
    return x_train, y_train.astype("int32"), x_test, y_test.astype("int32")


def _numbered(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import keras

    words = keras.layers.TextVectorization(max_tokens=VOCABULARY, output_sequence_length=WORDS)
    words.adapt(train)
    return _in_parts(words, train).astype("int32"), _in_parts(words, test).astype("int32")


def _in_parts(layer: Callable[[np.ndarray], Any], texts: np.ndarray) -> np.ndarray:
    parts = np.array_split(texts, max(1, len(texts) // READ_ROWS))
    return np.concatenate([layer(part).numpy() for part in parts])
