"""The running pipeline: stages on their threads, minibatches in, losses and predictions out."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

import tensorflow as tf

from pipetrain.compute.cores import is_remote
from pipetrain.compute.functions.inference import Replica
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.run.channels import Channels, Destination, Receiver, Sender, joined, take
from pipetrain.run.collector import Collector, Result, Snapshot
from pipetrain.run.control import Control
from pipetrain.run.device_thread import DeviceThread
from pipetrain.run.global_norm import GlobalNorm
from pipetrain.run.mailbox import Closed, Mailbox
from pipetrain.run.messages import Microbatch, Output, Updated
from pipetrain.run.reduction import Reduction
from pipetrain.run.run_settings import RunSettings
from pipetrain.run.stage_work import StageId, StageWork
from pipetrain.run.switch_interval import let_go, shorten
from pipetrain.run.transfers import here
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.splitting import microbatch_rows, window
from pipetrain.trace.trace import Span, Trace, Transfer

KEPT_SPANS = 200_000  # the newest spans, and transfers, that are kept, so that no run is too long for memory
Value = TypeVar("Value")


class Activity(NamedTuple):
    """Seconds of all devices' threads in actions, the number of threads, and the most microbatches a stage held.

    The seconds are not known for stages on other processes' devices, whose calls return before the work is done.
    ``updated``: whether every stage has made an update by now.
    """

    busy_s: float | None
    ranks: int
    most_in_flight: int
    updated: bool


class Pipeline:
    """A running pipeline: ``post`` minibatches, take as many ``result``s, ``drain``.

    Threads live from the first ``post`` to the next ``drain`` or ``abort``. ``post`` takes the weights from the model;
    ``drain`` and ``abort`` write them back.

    Args:
        stages: the replicas of every stage in order.
        scheme: order of actions and choice of weights.
        microbatches: pieces that a minibatch is split into.
        settings: called whenever the threads start.

    ``made`` are the updates of all runs up to the last drain, ``snapshots`` the weights that were kept.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Replica]],
        scheme: Scheme,
        microbatches: int,
        settings: Callable[[], RunSettings] = RunSettings,
    ) -> None:
        self._stages = [list(replicas) for replicas in stages]
        self._scheme, self._microbatches = scheme, microbatches
        self._ask_settings, self._settings = settings, RunSettings()
        self._devices = scheme.schedule.devices(len(self._stages))
        self._threads: list[DeviceThread] = []
        self._boxes: list[Mailbox[Any]] = []
        self._spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        self._transfers: deque[Transfer] = deque(maxlen=KEPT_SPANS)
        self.made = 0
        self._results: deque[Result] = deque()
        self._error: BaseException | None = None
        self._failing = threading.Lock()
        self._closed = False
        self._busy_s = 0.0
        self._traced_for: Any = ()
        self.snapshots: deque[Snapshot] = deque()

    @property
    def is_drained(self) -> bool:
        """Whether the weights are in the model: the next ``post`` takes them from there."""
        return not self._threads

    @property
    def window(self) -> int:
        """How many minibatches may be posted ahead of the results taken, see ``splitting.window``."""
        return window(len(self._stages), self._microbatches, self._scheme.schedule.flushes)

    def activity(self) -> Activity:
        """The stages' activity since the pipeline was made; the most in flight since the last call."""
        works = [work for thread in self._threads for work in thread.stages]
        most = max((work.most_in_flight for work in works), default=0)
        for work in works:
            work.most_in_flight = 0
        busy_s = self._busy_s + sum(thread.busy_s for thread in self._threads)
        known = self._settings.exact_times or not any(
            is_remote(replica.device) for stage in self._stages for replica in stage
        )
        ranks = sum(map(len, self._stages)) // self._scheme.schedule.chunks
        updated = self.made > 0 or min((work.version for work in works), default=0) > 0
        return Activity(busy_s if known else None, ranks, most, updated)

    @property
    def trace(self) -> Trace:
        """What happened up to the last drain."""
        since_s = self._spans[0].start_s if self._spans else 0.0
        ranks = None if self._scheme.schedule.chunks == 1 else self._devices
        return Trace.of(self._spans, (each for each in self._transfers if each.start_s >= since_s), ranks)

    def trace_for(self, targets: Any) -> bool:
        """Trace every stage, the last one for labels and sample weights of these specs; whether that was to be done.

        This is done once for each structure. Stages on whose outputs the loss does not depend are traced again with
        this knowledge.
        """
        if targets == self._traced_for:
            return False
        self.drain()
        masks: list[list[Any]] = [[None] * len(self._stages[0][0].segment.inputs)]
        for stage in self._stages:
            last = stage is self._stages[-1]
            masks.append([replica.trace(masks[-1], targets if last else None) for replica in stage][-1])
        for above, given, below in list(zip(self._stages, masks, self._stages[1:], strict=False))[::-1]:
            for replica in above if below[0].unreached else ():
                replica.trace(given, None, below[0].unreached)
        self.output_masks = masks[-1]
        self._traced_for = targets
        return True

    def post(self, x: list[tf.Tensor], y: Any, sample_weight: Any, learning_rate: float | None) -> None:
        """Send a minibatch on its way; starts the threads if the pipeline is empty."""
        if not self._threads:
            self._start()
        rows = int(x[0].shape[0])
        pieces = microbatch_rows(rows, self._microbatches)  # orders count on their number: some may be empty
        first = self._posted * self._microbatches
        group = range(first, first + len(pieces))
        for number, piece in zip(group, pieces, strict=True):
            microbatch = Microbatch(
                number=number,
                minibatch=self._posted,
                group=group,
                share=len(piece) / rows if rows else 1 / len(pieces),  # a minibatch without rows has a result too
                loss_is_mean=self._settings.loss_is_mean,
                rows=len(piece),
                learning_rate=learning_rate,
                values=None,
                targets=take((y, sample_weight), piece, rows),
            )
            inputs = BoundaryTensors(take(x, piece, rows), [None] * len(x)) if piece or not rows else None
            self._guarded(partial(self._entrance.send, microbatch.with_values, inputs, microbatch.rows))
        self._posted += 1

    def result(self) -> Result:
        """The next minibatch's loss and predictions, in order; waits for them. Raises what a stage raised."""
        while not self._results:
            self._collect(self._guarded(self._reports.get))
        return self._results.popleft()

    def drain(self) -> None:
        """Let everything in flight finish, end the threads, write the weights back. Raises what a stage raised."""
        if not self._threads:
            return
        if self._closed and self._error is None:  # an interrupt cut an abort short
            self.abort(store=True)
            return
        if not self._control.running.is_set():
            raise RuntimeError(
                "The stages rest while a snapshot is looked at. Received: a call that needs the pipeline to drain. "
                "Try the model that the function is given."
            )
        self._guarded(self._entrance.close)
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        while len(self._reports):
            self._collect(self._reports.get())
        self._end(store=True)

    def abort(self, store: bool) -> None:
        """End the threads at once, whatever is in flight, and write the weights back if ``store``."""
        if self._threads:
            self._close()
            for thread in self._threads:
                thread.ended()
            self._end(store)
        self._results.clear()
        self.snapshots.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """During the context no stage begins an action; what is in flight stays in flight."""
        if not self._threads:
            yield
            return
        self._control.running.clear()
        try:
            yield
        finally:
            self._control.running.set()

    def restore(self, snapshot: Snapshot) -> None:
        """Write a snapshot into the model's own variables."""
        for (stage, *_), values in zip(self._stages, snapshot.stages, strict=True):
            stage.store(values)

    def _start(self) -> None:
        self._error, self._closed = None, False
        self._posted = 0
        settings = self._settings = self._ask_settings()
        self._reports: Mailbox[Output | Updated] = Mailbox()
        self._control = Control(self._reports.put, self._fail, self._wants_snapshot, settings.exact_times)
        replicas = [len(stage) for stage in self._stages]
        self._collector = Collector(replicas, not self._scheme.asynchronous, settings.steps)
        for stage in self._stages:
            for number, replica in enumerate(stage):
                replica.load(settings.updates, number)
        threads = self._make_threads()
        self._threads = threads  # from here on an interrupt finds all that is to be undone
        shorten(self)
        for thread in threads:
            thread.start()

    def _make_threads(self) -> list[DeviceThread]:
        """A thread for each device of the schedule, or for each replica of the device's stages."""
        works, schedule = self._make_works(), self._scheme.schedule
        threads = []
        for device in range(self._devices):
            stages = [works[stage] for stage in schedule.stages_on(device, len(self._stages))]
            for replicas in zip(*stages, strict=True):
                threads.append(
                    DeviceThread(device, self._devices, replicas, self._scheme, self._microbatches, self._control)
                )
        return threads

    def _make_works(self) -> list[list[StageWork]]:
        # Microbatches come from the replicas above (into stage 0 from the caller), gradients from those below.
        sizes = [len(stage) for stage in self._stages]
        down = [_mailboxes(*pair) for pair in zip(sizes, [1, *sizes[:-1]], strict=True)]
        up = [_mailboxes(*pair) for pair in zip(sizes, [*sizes[1:], 0], strict=True)]
        reductions = [Reduction(stage) for stage in self._stages]
        self._boxes = [box for way in (down, up) for stage in way for boxes in stage for box in boxes]
        self._boxes += [box for reduction in reductions for box in reduction.mailboxes]
        norm = GlobalNorm(cast("list[list[Stage]]", self._stages)) if self._stages[0][0].global_clipnorm else None
        self._boxes += norm.mailboxes if norm else []
        self._boxes.append(self._reports)
        self._entrance = _sender(down[0], self._stages[0], 0, 1)
        works: list[list[StageWork]] = [[] for _ in self._stages]
        last = len(self._stages) - 1
        for k, stage in enumerate(self._stages):
            for number, replica in enumerate(stage):
                identity = StageId(k, len(self._stages), number, len(stage))
                channels = Channels(
                    inbox=Receiver(down[k][number], _joined_microbatches),
                    returns=Receiver(up[k][number], cast("Callable[[list[Any]], list[Any] | None]", joined)),
                    above=_sender(up[k - 1], self._stages[k - 1], number, len(stage)) if k > 0 else None,
                    below=_sender(down[k + 1], self._stages[k + 1], number, len(stage)) if k < last else None,
                    reduction=reductions[k],
                    norm=norm,
                )
                works[k].append(StageWork(identity, replica, self._scheme, self._microbatches, channels, self._control))
        return works

    def _end(self, store: bool) -> None:
        """Clean up after the threads; an interrupt before they are removed repeats this."""
        let_go(self)
        try:
            if store:
                self._hand_back()
        except Exception:  # which would come again: the model stays as it was
            self._threads, self._boxes = [], []
            raise
        threads = self._threads
        works = [work for thread in threads for work in thread.stages]
        made = self.made + min(work.version for work in works)
        self._threads, self._boxes, self.made = [], [], made
        self._spans.extend(sorted(chain(*(thread.spans for thread in threads)), key=_start_s))
        self._transfers.extend(sorted(chain(*(work.transfers() for work in works)), key=_start_s))
        self._busy_s += sum(thread.busy_s for thread in threads)

    def _hand_back(self) -> None:
        """Write all stages' weights and state into the model, after all of them have been fetched.

        If a worker is lost during that, the model is not changed, and its stages do not have different versions.
        """
        stages: list[list[Any]] = [*self._stages]  # each of one kind
        outcomes = [here(stage.outcome(others)) for stage, *others in stages]
        for (stage, *_), values in zip(self._stages, outcomes, strict=True):
            stage.store(values)

    def _wants_snapshot(self, version: int) -> bool:
        steps, every = self._settings.steps + version, self._settings.snapshot_every
        return every > 0 and steps % every == 0

    def _collect(self, report: Output | Updated) -> None:
        self._collector.add(report)
        self._results.extend(self._collector.results)
        self.snapshots.extend(self._collector.snapshots)
        self._collector.results.clear()
        self._collector.snapshots.clear()

    def _fail(self, error: BaseException, place: str) -> None:
        """Called by a device's thread: keeps the first exception, with its place, and stops everyone."""
        with self._failing:  # several may fail at once
            if self._error is None:
                _add_note(error, place)
                self._error = error
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._control.running.set()
        for box in self._boxes:
            box.close()

    def _guarded(self, call: Callable[[], Value]) -> Value:
        """``call()``, or what a stage raised if the pipeline failed meanwhile."""
        try:
            return call()
        except Closed:
            if self._error is not None:
                raise self._error from None
            raise


def _start_s(record: Span | Transfer) -> float:
    return record.start_s


def _mailboxes(readers: int, writers: int) -> list[list[Mailbox[Any]]]:
    """A mailbox for every reader and every writer."""
    return [[Mailbox() for _ in range(writers)] for _ in range(readers)]


def _sender(boxes: list[list[Mailbox[Any]]], readers: Sequence[Replica], replica: int, replicas: int) -> Sender:
    """The sender of one replica: to each reader, the mailbox for this writer."""
    destinations = [Destination(mine[replica], reader.device) for mine, reader in zip(boxes, readers, strict=True)]
    return Sender(destinations, replica, replicas)


def _joined_microbatches(parts: Sequence[Microbatch | None]) -> Microbatch:
    """One microbatch joined from the parts of the replicas above: rows concatenated, penalties added."""
    present = [part for part in parts if part is not None]
    penalties = [part.penalty for part in present if part.penalty is not None]
    values = joined([part.values for part in present])
    return present[0].with_values(values)._replace(penalty=tf.add_n(penalties) if penalties else None)


def _add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:  # what add_note does, for tracebacks that know of notes
        error.__notes__ = [*getattr(error, "__notes__", []), note]
