"""The running pipeline: stages on their threads, minibatches in, losses and predictions out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import HOST, is_prompt
from pipetrain.compute.functions.inference import Replica, trace_stages
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.optimizer.gradient_scaling import LossScale
from pipetrain.run.channels import take
from pipetrain.run.collector import Microbatch, OutputReport, Result, Snapshot, UpdateReport
from pipetrain.run.control import LostWorker, RunSettings
from pipetrain.run.device_threads import Running, let_go, shorten
from pipetrain.run.gradient_exchange import here
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.splitting import microbatch_rows, window
from pipetrain.trace.records import Recent, Spans, Transfers
from pipetrain.trace.trace import Trace

KEPT_SPANS = 100_000  # the newest spans, of 44 bytes, and transfers, of 60, that are kept: no run is too long

RESTING = (
    "The stages rest while a snapshot is looked at. Received: a call that needs the pipeline to drain. "
    "Try the model that the function is given."
)


class Activity(NamedTuple):
    """Seconds of all devices in actions, and the number of devices that execute one action at a time.

    The seconds are not known for stages on GPUs and, where threads call them, on other processes' devices: such calls
    return before the work is done.
    ``updated``: whether every stage has made an update by now.
    """

    busy_s: float | None
    ranks: int
    updated: bool


class Pipeline:
    """A running pipeline: ``post`` minibatches, take as many ``result``s, ``drain``.

    Threads live from the first ``post`` to the next ``drain`` or ``abort``. ``post`` takes the weights from the model;
    ``drain`` and ``abort`` write them back.

    Args:
        stages: the replicas of every stage in order.
        scheme: order of actions and choice of weights.
        microbatches: how many a minibatch is split into.
        settings: called whenever the threads start.

    ``made`` are the updates of all runs up to the last drain, ``loss_scale`` what the last run has made of that with
    which it began, ``snapshots`` the weights that were kept; from ``trace_for`` on, ``traced_for`` are the specs of
    labels and sample weights, and ``output_masks`` those of the model's outputs' masks.
    """

    sends_ahead = False  # a stage is sent what is posted at once
    keeps_flight = False  # what threads are at has no end that all of them come to but a drain

    def __init__(
        self,
        stages: Sequence[Sequence[Replica]],
        scheme: Scheme,
        microbatches: int,
        settings: Callable[[], RunSettings] = RunSettings,
    ) -> None:
        self._stages = [list(replicas) for replicas in stages]
        self._scheme, self._microbatches = scheme, microbatches
        self._settings = settings
        self._devices = scheme.schedule.devices(len(self._stages))
        self._running: Running | None = None
        self._spans, self._transfers = Recent(Spans, KEPT_SPANS), Recent(Transfers, KEPT_SPANS)
        self.made, self.loss_scale = 0, LossScale()
        self._posted = 0  # minibatches of all runs up to the last drain
        self._starts: deque[int] = deque(maxlen=KEPT_SPANS)  # the first microbatch of each of them
        self._results: deque[Result] = deque()
        self._busy_s = 0.0
        self._knows_seconds = all(is_prompt(replica.device) for stage in stages for replica in stage)
        self._exact_times = False  # of the last run
        self._lost = LostWorker(replica.device for stage in stages for replica in stage)
        self.traced_for: Any = ()
        self.output_masks: Sequence[Any] = ()
        self.snapshots: deque[Snapshot] = deque()

    @property
    def is_drained(self) -> bool:
        """Whether the weights are in the model: the next ``post`` takes them from there."""
        return self._running is None

    @property
    def is_lost(self) -> bool:
        """Whether a worker was lost: what was on it is gone."""
        return self._lost.error is not None

    @property
    def window(self) -> int:
        """How many minibatches may be posted ahead of the results taken, see ``splitting.window``."""
        return window(len(self._stages), self._microbatches, self._scheme.schedule.flushes)

    def activity(self) -> Activity:
        """The stages' activity since the pipeline was made."""
        running = self._running
        works = running.works if running else []
        busy_s = self._busy_s + sum(thread.busy_s for thread in running.threads) if running else self._busy_s
        known = self._knows_seconds or self._exact_times
        ranks = sum(map(len, self._stages)) // self._scheme.schedule.chunks
        updated = self.made > 0 or min((work.version for work in works), default=0) > 0
        return Activity(busy_s if known else None, ranks, updated)

    @property
    def trace(self) -> Trace:
        """What happened up to the last drain."""
        spans, sent = self._spans.columns(), self._transfers.columns()
        since_s = spans.start_s[0] if len(spans) else 0.0
        ranks = None if self._scheme.schedule.chunks == 1 else self._devices
        return Trace.of(spans, sent[sent.start_s >= since_s], ranks, self._starts)

    def trace_for(self, targets: Any) -> bool:
        """Trace every stage, the last one for labels and sample weights of these specs; whether that was to be done.

        This is done once for each structure.
        """
        if targets == self.traced_for:
            return False
        self.drain()
        self.output_masks = trace_stages(self._stages, targets)
        self.traced_for = targets
        return True

    def post(self, x: list[tf.Tensor], y: Any, sample_weight: Any, learning_rate: float | None) -> None:
        """Send a minibatch on its way; starts the threads if the pipeline is empty."""
        running = self._running or self._start()
        rows = int(x[0].shape[0])
        parts = microbatch_rows(rows, self._microbatches)  # orders count on their number: some may be empty
        first = running.posted * self._microbatches
        group = range(first, first + len(parts))
        takes = len(parts) > 1 or len(self._stages[0]) > 1
        with tf.device(HOST) if takes else nullcontext():
            for number, part in zip(group, parts, strict=True):
                microbatch = Microbatch(
                    number=number,
                    minibatch=running.posted,
                    group=group,
                    share=len(part) / rows if rows else 1 / len(parts),  # a minibatch without rows has a result too
                    loss_is_mean=running.settings.loss_is_mean,
                    rows=len(part),
                    learning_rate=learning_rate,
                    values=None,
                    targets=take((y, sample_weight), part, rows),
                )
                inputs = BoundaryTensors(take(x, part, rows), [None] * len(x)) if part or not rows else None
                running.control.guarded(partial(running.entrance.send, microbatch.with_values, inputs, microbatch.rows))
        running.posted += 1

    def send_ahead(self, x: list[tf.Tensor], y: Any, sample_weight: Any) -> None:
        """A minibatch that is to be posted next; for pipelines that send it now."""

    def result(self) -> Result:
        """The next minibatch's loss and predictions, in order; waits for them. Raises what a stage raised."""
        while not self._results:
            running = cast(Running, self._running)  # as long as a minibatch has no result
            self._collect(running, running.control.guarded(running.control.reports.get))
        return self._results.popleft()

    def drain(self) -> None:
        """Let everything in flight finish, end the threads, write the weights back. Raises what a stage raised."""
        running = self._running
        if running is None:
            return
        if running.control.closed and running.control.error is None:  # an interrupt cut an abort short
            self.abort(store=True)
            return
        if not running.control.running.is_set():
            raise RuntimeError(RESTING)
        running.control.guarded(running.entrance.close)
        for thread in running.threads:
            thread.ended(self._lost.gives_up)
        if running.control.error is not None:
            raise running.control.error
        while len(running.control.reports):
            self._collect(running, running.control.reports.get())
        self._end(running, store=True)

    def abort(self, store: bool) -> None:
        """End the threads at once, whatever is in flight, and write the weights back if ``store``."""
        if self._running is not None:
            self._running.control.close()
            for thread in self._running.threads:
                thread.ended(self._lost.gives_up)
            self._end(self._running, store)
        self._results.clear()
        self.snapshots.clear()

    def lose(self, error: Exception) -> None:
        """From another thread: a worker is lost. Whoever waits for stages is given the error."""
        self._lost.told(error)
        if (running := self._running) is not None:
            running.control.lose(error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """During the context no stage begins an action; what is in flight stays in flight."""
        if self._running is None:
            yield
            return
        control = self._running.control
        control.running.clear()
        try:
            yield
        finally:
            control.running.set()

    def restore(self, snapshot: Snapshot) -> None:
        """Write a snapshot into the model's own variables."""
        for (stage, *_), values in zip(self._stages, snapshot.stages, strict=True):
            stage.store(values)

    def _start(self) -> Running:
        settings = self._lost.unless_lost(self._settings)
        self._lost.unless_lost(partial(self._load, settings))
        kept = KEPT_SPANS if settings.is_traced else 0
        if not kept:
            self._spans.clear()
            self._transfers.clear()
        running = Running(self._stages, self._scheme, self._microbatches, settings, kept)
        self._running, self._exact_times = running, settings.exact_times  # an interrupt finds what is to be undone
        shorten(self)
        running.start()
        return running

    def _load(self, settings: RunSettings) -> None:
        for stage in self._stages:
            for number, replica in enumerate(stage):
                replica.load(settings.updates, number)

    def _end(self, running: Running, store: bool) -> None:
        """Clean up after the threads; an interrupt before they are removed repeats this."""
        let_go(self)
        try:
            if store:
                self._hand_back()
        except Exception:  # which would come again: the model stays as it was
            self._running = None
            raise
        last = min(running.works, key=lambda work: work.version)  # where an abort has left some behind
        spans = Spans.joined([thread.spans.columns() for thread in running.threads])
        sent = Transfers.joined([work.transfers() for work in running.works])
        first, made = self._posted * self._microbatches, self.made  # a run counts both from 0 on, its trace goes on
        self._running, self.made, self.loss_scale = None, made + last.version, last.updates.loss_scale
        self._posted += running.posted
        self._starts.append(first)
        spans = replace(spans, microbatch=first + spans.microbatch, version=made + spans.version)
        sent = replace(sent, microbatch=first + sent.microbatch)
        self._spans.extend(spans[np.argsort(spans.start_s, kind="stable")])
        self._transfers.extend(sent[np.argsort(sent.start_s, kind="stable")])
        self._busy_s += sum(thread.busy_s for thread in running.threads)

    def _hand_back(self) -> None:
        """Write all stages' weights and state into the model, after all of them have been fetched.

        If a worker is lost during that, the model is not changed, and its stages do not have different versions.
        """
        stages: list[list[Any]] = [*self._stages]  # each of one kind
        outcomes = self._lost.unless_lost(lambda: [here(stage.outcome(others)) for stage, *others in stages])
        for (stage, *_), values in zip(self._stages, outcomes, strict=True):
            stage.store(values)

    def _collect(self, running: Running, report: OutputReport | UpdateReport) -> None:
        collector = running.collector
        collector.add(report)
        self._results.extend(collector.results)
        self.snapshots.extend(collector.snapshots)
        collector.results.clear()
        collector.snapshots.clear()
