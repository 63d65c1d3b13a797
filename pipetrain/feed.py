"""Minibatches out of Keras' iterator, in the shapes and types that the model takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import keras
import tensorflow as tf

from pipetrain import checks
from pipetrain.compute.bound import any_rows, direct
from pipetrain.run.readahead import Minibatch


class Feed:
    """Reads minibatches and prepares them for the model; one TensorFlow op each where the data come from TensorFlow.

    After ``open``, ``rows`` are those of the first minibatch, and ``targets`` the specs of the labels and the sample
    weights of every minibatch to come.

    Args:
        model: the model to feed.
    """

    def __init__(self, model: keras.Model) -> None:
        self.rows, self.targets = 0, None
        self._model = model
        self._read = tf.function(lambda iterator: self._prepared(next(iterator)), autograph=False)

    def open(self, iterator: Iterator[Any]) -> Iterator[Minibatch]:
        """The iterator's minibatches. Raises ValueError if they do not fit the model, StopIteration without data."""
        concrete = None
        if isinstance(iterator, tf.data.Iterator):
            concrete = self._read.get_concrete_function(iterator)
        minibatches = _read_all(concrete, iterator) if concrete else map(self._prepared, iterator)
        first = next(minibatches)
        self.rows = int(first.x[0].shape[0])
        _, *targets = concrete.structured_outputs if concrete else first
        self.targets = any_rows(tuple(targets))
        return chain([first], minibatches)

    def _prepared(self, data: Any) -> Minibatch:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        targets = keras.tree.map_structure(_tensor, (y, sample_weight))
        return Minibatch(checks.checked_inputs(x, self._model), *targets)


class InputFeed(Feed):
    """Reads inputs alone; labels, where there are any, may be anything."""

    def _prepared(self, data: Any) -> Minibatch:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return Minibatch(checks.checked_inputs(x, self._model), None, None)


def _read_all(concrete: Any, iterator: tf.data.Iterator) -> Iterator[Minibatch]:
    read = direct(concrete)
    try:
        while True:
            yield read(iterator)
    except tf.errors.OutOfRangeError:
        return


def _tensor(value: Any) -> Any:
    return None if value is None else tf.convert_to_tensor(value)
