"""When the minibatches of a fit are done, and so what each takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


def ends_s(model: keras.Model, x: Any, y: Any, batch_size: int, **settings: Any) -> list[float]:
    """Train for an epoch, quietly: when each of its minibatches was done."""
    import keras

    found: list[float] = []
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: found.append(time.perf_counter()))
    model.fit(x, y, batch_size=batch_size, verbose=0, callbacks=[clock], **settings)
    return found


def mean_s(ends: Sequence[float], first: int) -> float:
    """The mean seconds of a minibatch after so many that fill the pipeline and warm up."""
    return (ends[-1] - ends[first - 1]) / (len(ends) - first)
