"""The rows of a minibatch on their way to the workers, those of the next one while a step runs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.cores import is_remote
from pipetrain.run.channels import take
from pipetrain.run.lost_worker import LostWorker
from pipetrain.run.pipeline import HOST
from pipetrain.run.stoppable_thread import StoppableThread
from pipetrain.schemes.splitting import rows_of


class RowsPart(NamedTuple):
    """One worker's part of a minibatch: its number, its share of the rows, its inputs, its labels and weights."""

    worker: int
    share: float
    inputs: list[Any]
    targets: Any


class WorkerRows:
    """Divides minibatches among workers.

    Args:
        devices: the workers', in order.
        together: how many neighbours are each given the inputs of the rows of all of them.

    ``lost`` is what is known of a lost worker: what is on its way to it is not waited for.
    """

    def __init__(self, devices: Sequence[str], together: int = 1) -> None:
        self._devices, self._together = list(devices), together
        self.sends_ahead = any(map(is_remote, devices))
        self.lost = LostWorker()
        self._ahead = deque[tuple[Any, _Sending]]()  # minibatches' inputs, and their rows on their way, in order

    def send_ahead(self, x: list[tf.Tensor], targets: Any) -> None:
        """Send a minibatch that will be asked for next, in a thread of its own, when it is ``let_go``."""
        self._ahead.append((x, _Sending(self, x, targets)))

    def let_go(self) -> None:
        """What is to be sent ahead may leave."""
        for _, sending in self._ahead:
            sending.may_leave.set()

    def of(self, x: list[tf.Tensor], targets: Any) -> list[RowsPart]:
        """Each worker's part, on its device, of those that have one. Raises what sending it has raised."""
        while any(ahead is x for ahead, _ in self._ahead):  # before it are those of an epoch that was stopped
            parts = self._ahead[0][1].parts()
            if self._ahead.popleft()[0] is x and parts is not None:
                return parts
        self.lost.check()
        return self.sent(x, targets)

    def forget(self) -> None:
        """Nothing is on its way any more."""
        while self._ahead:
            self._ahead.popleft()[1].parts()

    def sent(self, x: list[tf.Tensor], targets: Any) -> list[RowsPart]:
        """The parts, sent now. A minibatch without rows is the first worker's."""
        found, count = [], int(x[0].shape[0])
        for number, device in enumerate(self._devices):
            rows = rows_of(count, number, len(self._devices))
            read = self._read(count, number)
            if not read and (count or number >= self._together):
                continue
            with tf.device(HOST):
                mine = take(x, read, count), take(targets, rows, count)
            if is_remote(device):  # a worker does not fetch from this process: it is given what it needs
                with tf.device(device):
                    mine = tf.nest.map_structure(_identity, mine)
            found.append(RowsPart(number, len(rows) / count if count else 1.0, *mine))
        return found

    def _read(self, count: int, number: int) -> range:
        """The rows whose inputs a worker is given: its own, or those of all its group."""
        first = number - number % self._together
        last, parts = first + self._together - 1, len(self._devices)
        return range(rows_of(count, first, parts).start, rows_of(count, last, parts).stop)


class _Sending(StoppableThread):
    """Sends a minibatch; what fails fails again when it is sent anew, for who waits for it then."""

    def __init__(self, rows: WorkerRows, x: list[tf.Tensor], targets: Any) -> None:
        super().__init__(name="pipetrain rows", daemon=True)
        self._rows, self._given = rows, (x, targets)
        self._parts: list[RowsPart] | None = None
        self.may_leave = threading.Event()
        self.start()

    def run(self) -> None:
        """What the thread does."""
        self.may_leave.wait()
        try:
            self._parts = self._rows.sent(*self._given)
        except tf.errors.OpError:
            self._parts = None

    def parts(self) -> list[RowsPart] | None:
        """Wait for the end; what was sent, None if that failed."""
        self.may_leave.set()
        self.ended(self._rows.lost.gives_up)
        return self._parts


def _identity(tensor: Any) -> Any:
    return None if tensor is None else tf.identity(tensor)
