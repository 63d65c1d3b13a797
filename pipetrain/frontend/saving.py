"""A model that Keras saves and loads as if it had been compiled, and trained, by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras

# What ``compile`` sets, and saving and loading go by.
COMPILED = ("compiled", "optimizer", "loss", "_compile_config", "_compile_loss", "_compile_metrics", "_loss_tracker")


@contextmanager
def compiled_as(model: keras.Model, other: keras.Model) -> Iterator[keras.Model]:
    """The model, which meanwhile is compiled as the other one is, with its very optimizer and metrics.

    They are set past Keras, which would go on tracking what they hold.
    """
    mine, theirs = vars(model), vars(other)
    lent = {name: theirs[name] for name in COMPILED if name in theirs} if other.compiled else {}
    before = {name: mine[name] for name in lent if name in mine}
    try:
        mine.update(lent)
        yield model
    finally:
        for name in lent:
            mine.pop(name, None)
        mine.update(before)
