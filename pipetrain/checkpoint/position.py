"""Where in its data a training run is, and how to get there again without training."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipetrain.compute import keras_private
from pipetrain.compute.profiling.progress import Progress

PASSED_UNREAD = ("ArrayDataAdapter", "TFDatasetAdapter")  # whose every epoch reads anew


class Position(NamedTuple):
    """So many minibatches of an epoch (the first is 0) are done."""

    epoch: int
    step: int


def start_at(epoch_iterator: Any, position: Position, first_epoch: int, verbose: bool = True) -> None:
    """Make Keras' loop over epochs begin at this position, with the very minibatches that are due there.

    Of the epochs before it, whatever decides on the order of later ones happens again: iterators are made, generators
    are read, a PyDataset is told of its epochs. ``first_epoch`` is the one that ``fit`` would begin with;
    ``verbose``: whether it is shown if it takes long.
    """
    enumerate_epoch = keras_private.steps_of(epoch_iterator)

    def resumed() -> Iterator[Any]:
        keras_private.set_steps(epoch_iterator, None)  # the next epochs are Keras' own
        progress = Progress("Passing over the data of epochs that are done", (position.epoch - first_epoch) * verbose)
        for _ in range(first_epoch, position.epoch):
            _pass_over(epoch_iterator, enumerate_epoch())
            progress.add(1)
        steps = enumerate_epoch()
        progress = Progress("Passing over minibatches that are done", position.step * verbose)
        for done in range(position.step):
            try:
                *_, iterator = next(steps)
                next(iterator)
                progress.add(1)
            except StopIteration:
                raise ValueError(
                    f"The data end before the place where training stopped. Received: {done} minibatches, of which "
                    f"{position.step} are done. Try the data and the batch size of the run that is resumed."
                ) from None
        yield from steps

    keras_private.set_steps(epoch_iterator, resumed)


def _pass_over(epoch_iterator: Any, steps: Iterator[Any]) -> None:
    kind = type(epoch_iterator.data_adapter).__name__
    unread = epoch_iterator.steps_per_epoch is None and epoch_iterator.num_batches and kind in PASSED_UNREAD
    with warnings.catch_warnings(), epoch_iterator.catch_stop_iteration():
        warnings.simplefilter("ignore")
        for *_, iterator in steps:
            if not unread:
                next(iterator)
