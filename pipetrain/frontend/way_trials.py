"""What a minibatch takes by several ways to train: trials with a model's own ``fit``; nothing of them remains in it."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipetrain.checkpoint.arrays import assign, collected
from pipetrain.compute.keras_private import rate_of
from pipetrain.compute.optimizer.clone import clone
from pipetrain.compute.optimizer.loss_scaling import stepping
from pipetrain.compute.profiling.progress import Progress
from pipetrain.plan.run_off import TURNS, finalists, settled
from pipetrain.run.trial import TrialClock

MOST = 10**6  # minibatches, of which the clock needs fewer
TINY = 1e-20  # of the learning rate; some optimizers divide by it
FAILURES = (ValueError, TypeError, NotImplementedError, FloatingPointError, tf.errors.OpError)


class _Timing(keras.callbacks.Callback):
    """Stops training when enough minibatches are timed."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = TrialClock()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A result is there."""
        self.clock.tick()
        self.model.stop_training = self.model.stop_training or self.clock.is_enough


class WayTrial:
    """A model that trains in one way, in turns.

    Args:
        make: gives the model.
        data: inputs and labels of a minibatch.
        compiled: the arguments of ``compile``.
    """

    def __init__(self, make: Callable[[], keras.Model], data: Any, compiled: dict[str, Any]) -> None:
        self._make, self._data, self._compiled = make, data, compiled
        self.model: keras.Model | None = None

    def turn_s(self) -> float:
        """Median seconds from one minibatch to the next in a turn; infinite if the model cannot train.

        Raises what training raises, but for what may be due to this way: that it is refused, or needs too much memory.
        """
        timing = _Timing()
        try:
            if self.model is None:
                self.model = self._make()
                self.model.compile_with(**self._compiled)
            again = tf.data.Dataset.from_tensors(self._data).repeat()
            self.model.fit(again, steps_per_epoch=MOST, shuffle=False, verbose=0, callbacks=[timing])
        except FAILURES:
            return math.inf
        return timing.clock.minibatch_s


def compared_s(
    trials: Sequence[Callable[[], WayTrial]], fit_together: Callable[[Sequence[int]], bool], verbose: bool = True
) -> tuple[list[float], bool]:
    """Seconds of a minibatch by each of these ways, infinite if it cannot train, and whether that is to be kept.

    Each is tried alone, so that the devices' memory need not hold several. Then those that are near the fastest are
    made again, and take turns, if they ``fit_together``. Where that fails, the first trials hold, and are not to be
    kept: what made it fail may be over.
    """
    progress, first_s = Progress(f"Trying {len(trials)} ways to train.", len(trials) * verbose), []
    for made in trials:
        first_s.append(made().turn_s())
        gc.collect()  # its stages' weights, and what workers keep for it
        progress.add(1)
    near = finalists(first_s)
    turns_s = _in_turns({n: trials[n]() for n in near}, verbose) if fit_together(near) else {}
    gc.collect()
    return (first_s, False) if turns_s is None else (settled(first_s, turns_s), math.inf not in first_s)


def _in_turns(trials: Mapping[int, WayTrial], verbose: bool) -> dict[int, list[float]] | None:
    """Seconds of a minibatch of each in each of its turns; None if one cannot train beside the others."""
    progress = Progress(f"Trying {len(trials)} of them in turns.", TURNS * len(trials) * verbose)
    turns_s: dict[int, list[float]] = {n: [] for n in trials}
    for _ in range(TURNS):
        for n, trial in trials.items():
            turns_s[n].append(trial.turn_s())
            if turns_s[n][-1] == math.inf:
                progress.end()
                return None
            progress.add(1)
    return turns_s


def for_trials(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> keras.optimizers.Optimizer:
    """An optimizer that does the same work, with tiny steps unless a schedule or a function gives the learning rate.

    The loss of a minibatch that comes again then stays what it is.
    """
    variables, steps = model.trainable_variables, stepping(optimizer)
    copy = clone(steps, variables, variables)
    if isinstance(rate_of(copy), keras.Variable):
        copy.learning_rate = TINY
    return copy if steps is optimizer else keras.optimizers.LossScaleOptimizer(copy)


@contextmanager
def kept(model: keras.Model) -> Iterator[None]:
    """In the end the model has the weights and the state that it had, whatever was done with it.

    Python's and NumPy's random numbers, from which Keras draws seeds, go on as if nothing had been.
    """
    arrays, drawn, of_numpy = collected(model, (), ()), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        assign(model, arrays, (), ())
        random.setstate(drawn)
        np.random.set_state(of_numpy)
