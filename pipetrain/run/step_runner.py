"""Runs training steps over several devices, each one function, behind the interface of a ``Pipeline``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.keras_private import count_of
from pipetrain.compute.optimizer.loss_scaling import LossScale
from pipetrain.compute.transfers.record import Sent
from pipetrain.compute.transfers.step import Rows
from pipetrain.compute.transfers.weights import Shares
from pipetrain.compute.transfers.worker import Worker
from pipetrain.run.collector import Result, Snapshot
from pipetrain.run.pipeline import KEPT_SPANS, Activity
from pipetrain.run.run_settings import RunSettings
from pipetrain.run.transfers import here
from pipetrain.run.worker_rows import WorkerRows
from pipetrain.schemes.transfers.plan import Plan
from pipetrain.trace.trace import Span, Trace, Transfer, What

# Weights on their way to a worker, gradients on their way to their sums, and those that the next step's forward hides.
# Of a grid, activations on their way to the devices of a model group, and their gradients on the way back.
WHAT: dict[str, What] = {"pull": "W", "push": "R", "late": "R", "gather": "F", "scatter": "B"}


class StepRunner:
    """``post`` a minibatch, which makes a whole step, and take its ``result``; ``drain`` writes the weights back.

    Between the first ``post`` and the next ``drain`` the weights live on the devices.

    Args:
        weights: of every worker, or only those of the servers.
        workers: that compute.
        plan: of the transfers.
        steps: makes the function of a step, once the weights have been traced and taken from the model.
        rows: divides minibatches among the workers.
        settings: called whenever the weights are taken from the model.
        rate: gives the learning rate of a step that begins, None where the optimizers know it.

    Workers in other processes get their rows of the next minibatch while they compute this one.

    ``made``, ``loss_scale``, ``snapshots`` and ``output_masks`` as those of a ``Pipeline``.
    """

    window = 1  # minibatches that may be posted ahead of the results taken

    def __init__(
        self,
        weights: Sequence[Any],
        workers: Sequence[Worker],
        plan: Plan,
        steps: Callable[[], Any],
        rows: WorkerRows,
        settings: Callable[[], RunSettings],
        rate: Callable[[], float | None],
    ) -> None:
        self._weights, self._workers, self._settings, self._rate = list(weights), list(workers), settings, rate
        self._rows, self.sends_ahead = rows, rows.sends_ahead
        self._shares: dict[
            tuple[str, float], Shares
        ] = {}  # on the devices, since the weights were taken from the model
        self.plan, self._steps = plan, steps
        self._step: Any = None
        self._run: RunSettings | None = None  # of the steps since the weights were taken from the model
        self._steps_done = 0  # of these
        self._late_rate: float | None = None  # of the step whose late gradients wait
        self._waiting = False  # whether there are any
        self._traced_for: Any = ()
        self._results: deque[Result] = deque()
        self.made, self.loss_scale = 0, LossScale()
        self.output_masks: Sequence[Any] = ()
        self.snapshots: deque[Snapshot] = deque()
        self._spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        self._transfers: deque[Transfer] = deque(maxlen=KEPT_SPANS)

    @property
    def is_drained(self) -> bool:
        """Whether the weights are in the model."""
        return self._run is None

    def activity(self) -> Activity:
        """Of the devices; what they do within a step is not known."""
        return Activity(None, len(self._workers), 1, self.made + self._steps_done > 0)

    def trace_for(self, targets: Any) -> bool:
        """Trace the gradients for labels and sample weights of these specs; whether that was to be done."""
        if targets == self._traced_for:
            return False
        self.drain()
        first = self._weights[0]
        self.output_masks = first.trace([None] * len(first.segment.inputs), targets)
        self._step, self._traced_for = None, targets
        return True

    def post(self, x: list[tf.Tensor], y: Any, sample_weight: Any, learning_rate: float | None) -> None:
        """Make the minibatch's step."""
        settings = self._run or self._start()
        if self._step is None:
            self._step = self._steps()
        rate = self._rate()  # that of the minibatch is as old as its reading
        masks: list[Any] = [None] * len(x)
        rows = [
            Rows(
                part.worker,
                self._weights[0].sorted(BoundaryTensors(part.inputs, masks), part.targets),
                self._shares_of(self._workers[part.worker].device, part.share),
            )
            for part in self._rows.of(x, (y, sample_weight))
        ]
        self._set_rates(rate)
        start_s = time.perf_counter()
        result, sent = self._step(rows, self._waiting, settings.exact_times)
        self._note(start_s, result.times, sent, [each.worker for each in rows])
        self._late_rate, self._waiting = rate, self._step.is_late
        self._steps_done += 1
        for group in (group for weights in self._weights for group in weights.groups):
            group.updated()
        self._results.append(Result(result.loss, result.output))
        version = settings.steps + self._steps_done
        if settings.snapshot_every and version % settings.snapshot_every == 0:
            self._flush()
            self.snapshots.append(Snapshot(version, [self._outcome()]))

    @property
    def trace(self) -> Trace:
        """Every worker's steps, as this process saw them, and with exact times also the messages of their packs."""
        since_s = self._spans[0].start_s if self._spans else 0.0
        return Trace.of(self._spans, (each for each in self._transfers if each.end_s >= since_s))

    def _note(self, start_s: float, times: Any, sent: Sequence[Sent], active: Sequence[int]) -> None:
        """Record a step that has begun then and is over now, and its messages, whose times are those of day."""
        number, end_s = self.made + self._steps_done, time.perf_counter()
        for worker in active:
            device = self._workers[worker].device
            self._spans.append(Span("FB", 0, number, device, start_s, end_s, number, worker))
        if times is None:
            return
        places = {worker.device: n for n, worker in reversed([*enumerate(self._workers)])}
        from_day_s = end_s - time.time()
        late = len(self.plan.late.packs) * any(each.kind == "late" for each in sent)
        for each, (left_s, there_s) in zip(sent, times.numpy() + from_day_s, strict=True):
            ends = 0, places[each.source], 0, places[each.sink]
            begun_s = min(left_s, there_s)  # a time is noted when one of the device's threads is free for it
            pack = each.pack + (late if each.kind == "push" else 0)  # what is late is sent first
            seconds = float(begun_s), float(there_s)
            self._transfers.append(Transfer(WHAT[each.kind], number, *ends, each.size_bytes or 0, *seconds, pack))

    def send_ahead(self, x: list[tf.Tensor], y: Any, sample_weight: Any) -> None:
        """Send the rows of the minibatch that is to be posted next, while this one's step runs."""
        self._rows.send_ahead(x, (y, sample_weight))

    def _shares_of(self, device: str, share: float) -> Shares:
        assert self._run is not None  # within a step
        if (device, share) not in self._shares:
            with tf.device(device):
                of_loss = tf.constant(share if self._run.loss_is_mean else 1.0)
                self._shares[device, share] = Shares(of_loss, tf.constant(share))
        return self._shares[device, share]

    def _set_rates(self, learning_rate: float | None) -> None:
        """Gradients that waited are applied with the rate of the step that made them."""
        for weights in self._weights:
            for group in weights.groups:
                group.set_rate(self._late_rate if self.plan.are_late(group.numbers) else learning_rate)

    def result(self) -> Result:
        """The next minibatch's loss and predictions, in order."""
        return self._results.popleft()

    def _flush(self) -> None:
        """Apply gradients that wait for a next step."""
        if self._waiting and self._step is not None:
            self._set_rates(None)
            self._step.flush()
            self._waiting = False

    def drain(self) -> None:
        """All gradients are applied, and the weights in the model; rows that were sent ahead are the next step's."""
        if self._run is not None:
            self._flush()
            self._end(store=True)

    def abort(self, store: bool) -> None:
        """Like ``drain``, without writing back the weights unless ``store``."""
        if self._run is not None:
            if store:
                self._count(self._run)
                self._flush()
            self._end(store)
        self._rows.forget()
        self._results.clear()
        self.snapshots.clear()

    def _count(self, settings: RunSettings) -> None:
        """What has been done, by the optimizers' own counts: an interrupt may have come just after a step."""
        counts = {late: settings.updates for late in (False, True)}
        for group in self._weights[0].groups:
            counts[self.plan.are_late(group.numbers)] = int(count_of(group.optimizer).numpy())
        self._steps_done = counts[False] - settings.updates
        self._waiting = self._step is not None and self._step.is_late and counts[True] < counts[False]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing runs between two steps anyway."""
        yield

    def restore(self, snapshot: Snapshot) -> None:
        """Write a snapshot into the model's own variables."""
        self._store(snapshot.stages[0])

    def _start(self) -> RunSettings:
        settings = self._settings()
        for weights in self._weights:
            weights.load(settings.updates)
        if any([worker.load() for worker in self._workers]):  # each of them, whatever the first one says
            self._step = None
        self._run, self._steps_done, self._waiting, self._shares = settings, 0, False, {}
        return settings

    def _end(self, store: bool) -> None:
        done, self._steps_done = self._steps_done, 0
        try:
            if store:
                self._store(self._outcome())
        finally:  # an exception would come again: the model stays as it was
            self._run, self._waiting, self.made = None, False, self.made + done

    def _outcome(self) -> list[Any]:
        """The weights, and the state of all workers, as ``_store`` takes them."""
        first, *others = self._workers
        values = [*self._weights[0].stored(), *first.outcome(others, self._weights[0].assigned)]
        return [None if each is None else here([each])[0] for each in values]

    def _store(self, values: Sequence[Any]) -> None:
        count = len(self._weights[0].variables)
        self._weights[0].store(values[:count])
        self._workers[0].store(values[count:])
