"""The rows of minibatches as workers have them: divided among them and sent, or read by each on its own host."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.cores import HOST, is_remote
from pipetrain.run.channels import take
from pipetrain.run.control import LostWorker, StoppableThread
from pipetrain.schemes.splitting import rows_of


class RowsOnWorkers:
    """In place of a tensor: its rows are on several workers, one part after another in their order.

    Args:
        parts: every worker's, each on its own device.
    """

    def __init__(self, parts: Sequence[tf.Tensor]) -> None:
        self.parts, self.dtype = list(parts), parts[0].dtype

    @property
    def shape(self) -> tf.TensorShape:
        """That of the whole."""
        return tf.TensorShape([sum(int(each.shape[0]) for each in self.parts), *self.parts[0].shape[1:]])

    def on(self, device: str) -> tf.Tensor:
        """All rows on one device."""
        with tf.device(device):
            return tf.concat(self.parts, 0)


def on_one_device(values: Any, device: str, wanted: bool = True) -> Any:
    """Nested tensors; of those that are on several workers all rows, or none unless they are ``wanted``."""

    def there(each: Any) -> Any:
        if not isinstance(each, RowsOnWorkers):
            return each
        return each.on(device) if wanted else tf.zeros([0, *each.shape[1:]], each.dtype)

    return tf.nest.map_structure(there, values)


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

    def sent(self, x: list[Any], targets: Any) -> list[RowsPart]:
        """The parts, sent now, or as workers have read them. A minibatch without rows is the first worker's."""
        found, count = [], int(x[0].shape[0])
        if isinstance(x[0], RowsOnWorkers):
            return [self._read_by(n, x, targets, count) for n, part in enumerate(x[0].parts) if part.shape[0]]
        for number, device in enumerate(self._devices):
            rows = rows_of(count, number, len(self._devices))
            read = self._read(count, number)
            if not read and (count or number >= self._together):
                continue
            with tf.device(HOST):
                mine = take(x, read, count), take(targets, rows, count)
            found.append(RowsPart(number, len(rows) / count if count else 1.0, *given_to(device, mine)))
        return found

    def _read_by(self, number: int, x: list[Any], targets: Any, count: int) -> RowsPart:
        """What a worker has read on its host: for a GPU it is sent there."""
        device, parts = (
            self._devices[number],
            tf.nest.map_structure(lambda each: each and each.parts[number], (x, targets)),
        )
        if parts[0][0].device != device:
            parts = given_to(device, parts)
        return RowsPart(number, int(parts[0][0].shape[0]) / count, *parts)

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


def given_to(device: str, values: Any) -> Any:
    """Nested tensors for a call on this device: a worker does not fetch from this process, and is given what it needs.

    On devices of this process they are as they are.
    """
    if not is_remote(device):
        return values
    with tf.device(device):
        return tf.nest.map_structure(copied_here, values)


def copied_here(tensor: Any) -> Any:
    """The tensor on the device of this scope; None stays None."""
    return None if tensor is None else tf.identity(tensor)
