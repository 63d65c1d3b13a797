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
        self._read = tf.function(lambda optional: self._prepared(optional.get_value()), autograph=False)

    def open(self, iterator: Iterator[Any]) -> Iterator[Minibatch]:
        """The iterator's minibatches. Raises ValueError if they do not fit the model, StopIteration without data."""
        concrete = None
        if isinstance(iterator, tf.data.Iterator):
            concrete = self._read.get_concrete_function(tf.OptionalSpec(iterator.element_spec))
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


class Untuned:
    """A distribution strategy whose data sets TensorFlow does not tune while they are read, unless they ask for it.

    The thread that tunes looks up at ever longer intervals, up to a minute, and whoever lets go of an iterator waits
    for it (TensorFlow 2.21): at an epoch's end, for up to as long again as the epoch took. What would be tuned then
    takes the number of cores.

    Args:
        strategy: all else is left to it.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """The data set, for Keras to read."""
        return self._strategy.experimental_distribute_dataset(untuned(dataset), options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same data set; see ``Untuned``."""
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _read_all(concrete: Any, iterator: tf.data.Iterator) -> Iterator[Minibatch]:
    """Every minibatch. Data that end with an error in one thread can break what another does at that moment."""
    read = direct(concrete)
    while (optional := iterator.get_next_as_optional()).has_value():
        yield read(optional)


def _tensor(value: Any) -> Any:
    return None if value is None else tf.convert_to_tensor(value)
