"""What the threads of a pipeline share: settings, where they report, what pauses them, and what ends them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from pipetrain.compute.cores import finish
from pipetrain.compute.optimizer.gradient_scaling import LossScale
from pipetrain.run.collector import OutputReport, UpdateReport
from pipetrain.run.transfers import Closed, Mailbox


class RunSettings(NamedTuple):
    """Settings that hold from one start of the threads to the next drain.

    ``updates``: the steps of the optimizer so far. ``steps``: the updates of this ``fit`` so far, from which snapshots
    count. ``snapshot_every``: the weights are kept whenever this number of updates has been made; 0 for never.
    ``loss_is_mean``: whether a minibatch's loss is the mean (else the sum) over its rows. ``exact_times``: whether
    threads wait for GPUs and workers, so that the trace has their times of completion. ``loss_scale``: that of the
    first minibatch. ``is_traced``: whether a trace is kept.
    """

    updates: int = 0
    steps: int = 0
    snapshot_every: int = 0
    loss_is_mean: bool = True
    exact_times: bool = False
    loss_scale: LossScale = LossScale()
    is_traced: bool = True


Value = TypeVar("Value")


class Closable(Protocol):
    """What threads may wait at."""

    def close(self) -> None:
        """End all waiting."""


class Control:
    """Reports, pauses and the end of the threads of one run.

    It knows none of the stages: they are gone, with all tensors that they hold, as soon as nobody else has them.

    Args:
        settings: of this run.

    ``reports`` gives what the last stage and the updates came to. ``boxes`` are what threads may wait at.
    ``waits``: whether threads wait for GPUs, so that spans and transfers have the times of completion. ``error`` is the
    first exception of a thread, ``closed`` whether nothing is waited for any more.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.reports: Mailbox[OutputReport | UpdateReport] = Mailbox()
        self.report: Callable[[OutputReport | UpdateReport], None] = self.reports.put
        self.boxes: list[Closable] = [self.reports]
        self.waits, self._settings = settings.exact_times, settings
        self.error: BaseException | None = None
        self.closed = False
        self._failing = threading.Lock()
        self.running = threading.Event()
        self.running.set()

    def wants_snapshot(self, version: int) -> bool:
        """Whether this version of the weights is to be kept."""
        steps, every = self._settings.steps + version, self._settings.snapshot_every
        return every > 0 and steps % every == 0

    def wait_if_paused(self) -> None:
        """Wait while the pipeline is paused."""
        if not self.running.is_set():  # waiting would take the event's lock, which all share
            self.running.wait()

    def finish(self, device: str) -> None:
        """Wait until the device has finished its calls, if the trace is to have the times of completion."""
        if self.waits:
            finish(device)

    def fail(self, error: BaseException, place: str | None = None) -> None:
        """Called by a device's thread: keeps the first exception, with its place, and stops everyone."""
        with self._failing:  # several may fail at once
            if self.error is None:
                if place is not None:
                    add_note(error, place)
                self.error = error
        self.close()

    def lose(self, error: Exception) -> None:
        """Called when a worker is lost, and repeatedly from then on: stops everyone."""
        if not self.closed:
            self.fail(error)

    def close(self) -> None:
        """End whatever is waited for: threads end at their next action."""
        self.closed = True
        self.running.set()
        for box in self.boxes:
            box.close()

    def guarded(self, call: Callable[[], Value]) -> Value:
        """``call()``, or what a stage raised if the pipeline failed meanwhile."""
        try:
            return call()
        except Closed:
            if self.error is not None:
                raise self.error from None
            raise


def add_note(error: BaseException, note: str) -> None:
    """Add a line to what people see of an error."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:  # what add_note does, for tracebacks that know of notes
        error.__notes__ = [*getattr(error, "__notes__", []), note]
