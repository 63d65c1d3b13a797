"""When messages left and when they had arrived, noted on the devices themselves within one traced function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

What = Literal["pull", "push", "late", "return", "gather", "scatter"]


class RecordedMessage(NamedTuple):
    """A part of a pack of a phase, sent from one device to another, with its bytes."""

    kind: What
    pack: int
    source: str
    sink: str
    size_bytes: int | None


class Record:
    """Collects times of day while a function is traced; its results are then returned by the function.

    ``messages`` are in the order in which they were added; each has two times, that of its leaving its source and that
    of its arrival.
    """

    def __init__(self) -> None:
        self.messages: list[RecordedMessage] = []
        self._times: list[tuple[tf.Tensor, tf.Tensor]] = []

    def add(self, kind: What, pack: int, source: str, sink: str, there: tf.Tensor) -> tf.Tensor:
        """A message has arrived as this tensor, a copy of the one that left; gives the time of that."""
        (leaving,) = there.op.inputs
        count = leaving.shape.num_elements()
        size_bytes = None if count is None else count * leaving.dtype.size
        self.messages.append(RecordedMessage(kind, pack, source, sink, size_bytes))
        number = len(self.messages)
        self._times.append((_time(source, leaving, 2 * number), _time(sink, there, 2 * number + 1)))
        return self._times[-1][1]

    def times(self, host: str) -> tf.Tensor:
        """The times of day of all messages, of shape (messages, 2), on this process's device."""
        by_device: dict[str, list[tuple[int, tf.Tensor]]] = {}
        for n, (message, pair) in enumerate(zip(self.messages, self._times, strict=True)):
            for side, (device, time) in enumerate(zip((message.source, message.sink), pair, strict=True)):
                by_device.setdefault(device, []).append((2 * n + side, time))
        stacked, places = [], list[int]()
        for device, times in by_device.items():  # one message from each device
            with tf.device(device):
                stacked.append(tf.stack([time for _, time in times]))
            places += [place for place, _ in times]
        with tf.device(host):
            if not stacked:
                return tf.zeros([0, 2], tf.float64)
            joined = tf.concat([tf.identity(each) for each in stacked], 0)
            order: Sequence[Any] = sorted(range(len(places)), key=lambda n: places[n])
            return tf.reshape(tf.gather(joined, order), [-1, 2])


def _time(device: str, tensor: tf.Tensor, number: int) -> tf.Tensor:
    """The time of day when the tensor was there, on its device.

    In a call that TensorFlow takes for one without side effects: it would let each time wait for the one before. The
    number, another for each call, keeps it from making one of them.
    """
    with tf.device(device), tf.control_dependencies([tensor.op]):
        (time,) = tf.raw_ops.PartitionedCall(args=[tf.constant(number)], Tout=[tf.float64], f=_clock())
    return time


def _clock() -> Any:
    def now(number: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([number]):
            return tf.timestamp()

    return tf.function(now, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))
