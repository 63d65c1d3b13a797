"""Whole training steps, one after another, behind the interface of a ``Pipeline``: what all ways to make them share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from pipetrain.compute.cores import finish
from pipetrain.compute.optimizer.gradient_scaling import LossScale
from pipetrain.run import pipeline
from pipetrain.run.collector import Result, Snapshot
from pipetrain.run.control import LostWorker, RunSettings
from pipetrain.run.pipeline import Activity
from pipetrain.trace.records import Recent, Spans, Transfers
from pipetrain.trace.trace import Trace


class Stepwise:
    """``post`` a minibatch, which makes a whole step, and take its ``result``; ``drain`` writes the weights back.

    Between the first ``post`` and the next ``drain`` the weights live on the devices.

    Args:
        workers: the devices that compute.
        settings: called whenever the weights are taken from the model.
        rate: gives the learning rate of a step that begins, None where the optimizers know it.

    ``made``, ``loss_scale``, ``snapshots``, ``traced_for`` and ``output_masks`` as those of a ``Pipeline``.
    """

    period = 1  # minibatches after which steps repeat
    window = 1  # minibatches that may be posted ahead of the results taken
    sends_ahead = False
    keeps_flight = False  # whether what devices hold can be had without a drain, see ``ProgramRunner.kept``

    def __init__(
        self,
        workers: Sequence[str],
        settings: Callable[[], RunSettings],
        rate: Callable[[], float | None],
    ) -> None:
        self._ranks, self._settings, self._rate = len(workers), settings, rate
        self._written_on = tuple(dict.fromkeys(workers))
        self._run: RunSettings | None = None  # of the steps since the weights were taken from the model
        self._steps_done = 0  # of these
        self.traced_for: Any = ()
        self._results: deque[Result] = deque()
        self._lost = LostWorker(workers)
        self.made, self.loss_scale = 0, LossScale()
        self.output_masks: Sequence[Any] = ()
        self.snapshots: deque[Snapshot] = deque()
        self._record(pipeline.KEPT_SPANS)
        self._starts: deque[int] = deque(maxlen=pipeline.KEPT_SPANS)  # the first step of each run

    @property
    def is_drained(self) -> bool:
        """Whether the weights are in the model."""
        return self._run is None

    @property
    def is_lost(self) -> bool:
        """Whether a worker was lost: what was on it is gone."""
        return self._lost.error is not None

    def activity(self) -> Activity:
        """Of the devices; what they do within a step is not known."""
        return Activity(None, self._ranks, self.made + self._steps_done > 0)

    @property
    def trace(self) -> Trace:
        """Every worker's steps, and messages as far as they are recorded."""
        spans, sent = self._spans.columns(), self._transfers.columns()
        since_s = spans.start_s[0] if len(spans) else 0.0
        return Trace.of(spans, sent[sent.end_s >= since_s], starts=self._starts, period=self.period)

    def _record(self, count: int) -> None:
        """Of spans and transfers so many, the newest, are kept from now on; those that there are, are forgotten."""
        self._recorded, self._spans, self._transfers = count, Recent(Spans, count), Recent(Transfers, count)

    def trace_for(self, targets: Any) -> bool:
        """Trace the gradients for labels and sample weights of these specs; whether that was to be done."""
        if targets == self.traced_for:
            return False
        self.drain()
        self.output_masks = self._gradients_traced(targets)
        self._retraced()
        self.traced_for = targets
        return True

    def _gradients_traced(self, targets: Any) -> Sequence[Any]:
        """Trace the gradients for such targets; gives the specs of the outputs' masks."""
        raise NotImplementedError

    def _retraced(self) -> None:
        """There are new functions for the gradients."""
        raise NotImplementedError

    def post(self, x: list[tf.Tensor], y: Any, sample_weight: Any, learning_rate: float | None) -> None:
        """Make the minibatch's step."""
        raise NotImplementedError

    def send_ahead(self, x: list[tf.Tensor], y: Any, sample_weight: Any) -> None:
        """The minibatch that is to be posted next, for those that send it now."""

    def result(self) -> Result:
        """The next minibatch's loss and predictions, in order."""
        return self._results.popleft()

    def _stepped(self, result: Result) -> None:
        """A step was made."""
        settings = self._run
        assert settings is not None  # within a step
        self._steps_done += 1
        self._results.append(result)
        version = settings.steps + self._steps_done
        if settings.snapshot_every and version % settings.snapshot_every == 0:
            self._flush()
            self.snapshots.append(Snapshot(version, [self._outcome()]))

    def drain(self) -> None:
        """All gradients are applied, and the weights in the model; rows that were sent ahead are the next step's."""
        if self._run is not None:
            self._lost.check()
            self._rest()
            self._lost.unless_lost(self._flush)
            self._end(store=True)

    def abort(self, store: bool) -> None:
        """Like ``drain``, without writing back the weights unless ``store``."""
        self._stop()  # of a start that an interrupt has cut short too
        if self._run is not None:
            if store:
                self._lost.unless_lost(partial(self._recount, self._run))
            self._end(store)
        self._forget()
        self._results.clear()
        self.snapshots.clear()

    def lose(self, error: Exception) -> None:
        """From another thread: a worker is lost. Steps do not call it any more, nor wait long for a call to it."""
        self._lost.told(error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model may have other weights meanwhile: what runs now reads none of its variables.

        Between two steps nothing runs, but that workers with a pace of their own go on, with what is on devices.
        """
        yield

    def restore(self, snapshot: Snapshot) -> None:
        """Write a snapshot into the model's own variables."""
        self._store(snapshot.stages[0])

    def _start(self) -> RunSettings:
        """Take the weights from the model."""
        settings = self._lost.unless_lost(self._settings)
        count = pipeline.KEPT_SPANS if settings.is_traced else 0
        if count != self._recorded:
            self._record(count)
        self._lost.unless_lost(partial(self._load, settings))
        self._run, self._steps_done = settings, 0
        self._starts.append(self.made)
        return settings

    def _end(self, store: bool) -> None:
        try:
            if store:
                self._store(self._lost.unless_lost(self._outcome))
        except Exception:  # which would come again: the model stays as it was; after an interrupt this is repeated
            self._steps_done = 0
            self._over()
            raise
        self._over()

    def _over(self) -> None:
        self._run, self.made, self._steps_done = None, self.made + self._steps_done, 0

    def _load(self, settings: RunSettings) -> None:
        """Take weights and state from the model."""
        raise NotImplementedError

    def _await_writes(self) -> None:
        """Wait until what was written to variables is there.

        A function over several processes does not wait for it: it would read what was there before, and what is
        written could replace its update.
        """
        for device in self._written_on:
            finish(device)

    def _recount(self, settings: RunSettings) -> None:
        """Like ``_flush``, after an interrupt."""
        self._count(settings)
        self._flush()

    def _count(self, settings: RunSettings) -> None:
        """What has been done, by the optimizers' own counts: an interrupt may have come just after a step."""
        raise NotImplementedError

    def _rest(self) -> None:
        """Let what still runs end. Raises what it raised."""

    def _stop(self) -> None:
        """End at once what still runs."""

    def _flush(self) -> None:
        """Apply gradients that wait for a next step."""

    def _forget(self) -> None:
        """Nothing that was sent ahead is on its way any more."""

    def _outcome(self) -> list[Any]:
        """Weights and state, as ``_store`` takes them."""
        raise NotImplementedError

    def _store(self, values: Sequence[Any]) -> None:
        """Write these into the model."""
        raise NotImplementedError
