"""Values as the devices of a model group have them, in any layout, and their gradients on the way back.

A value is in one of three layouts: each device has some rows of it; or some channels, for all rows of the group; or all
of it. It is made in one of the first two, and the others follow by messages between the devices, once. Gradients go the
same ways back: those of what all devices had are partial, each of what its device computed, and are summed on the way
to who made the part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import tensorflow as tf

from pipetrain.compute.transfers.message import Record, in_order, sent

Layout = Literal["rows", "channels"]
Parts = list[Any]  # of each device of the group, None for one that has none


class ModelGroup:
    """The devices that have the same rows of a minibatch, some of which each has to itself.

    Args:
        devices: their names.
        counts: how many of the rows are each one's own.
        record: of messages, if there is to be one.

    ``active`` are the numbers of the devices that have rows of their own; of a minibatch without rows the first.
    """

    def __init__(self, devices: Sequence[str], counts: Sequence[int], record: Record | None) -> None:
        self.devices, self._record, self._messages = list(devices), record, 0
        self._starts = [sum(counts[:rank]) for rank in range(len(counts))]
        self._counts, self._total = list(counts), sum(counts)
        self.active = [rank for rank, count in enumerate(counts) if count] or [0]

    @property
    def ranks(self) -> range:
        """The numbers of all devices."""
        return range(len(self.devices))

    def begin(self) -> None:
        """What is sent from now on belongs together."""
        self._messages += 1

    def send(self, make: Callable[[], tf.Tensor], source: int, sink: int, forward: bool) -> tf.Tensor:
        """What is made on one device, on another."""
        with tf.device(self.devices[source]):
            tensor = make()
        there = sent(tensor, self.devices[source], self.devices[sink], [])
        if self.devices[source] != self.devices[sink] and self._record is not None:
            kind: Any = "gather" if forward else "scatter"
            self._record.add(kind, self._messages, self.devices[source], self.devices[sink], there)
        return there

    def rows(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """A device's own rows of what is of all rows; each may be several of the tensor's."""
        size = tensor.shape[0] if tensor.shape[0] is not None else tf.shape(tensor)[0]
        times = size // max(1, self._total)
        start = self._starts[rank] * times
        return tensor[start : start + self._counts[rank] * times]


class Value:
    """A value that a model group has.

    Args:
        group: the devices.
        parts: as it is made, or given.
        channels: each device's channels and the axis on which they are, if it is made so.
        mask: of each device's rows, None for a value without a mask.
        whole: all rows on every device, if they are there already.
    """

    def __init__(
        self,
        group: ModelGroup,
        parts: Parts,
        channels: tuple[int, Sequence[range]] | None = None,
        mask: Parts | None = None,
        whole: Parts | None = None,
    ) -> None:
        self._group, self._parts, self._channels = group, parts, channels
        self.mask: Parts = mask or [None] * len(group.devices)
        self._rows, self._whole = None if channels else parts, whole
        self._by_rows: Parts | None = None  # gradients
        self._by_whole: Parts | None = None

    @property
    def rows(self) -> Parts:
        """Each device's own rows of it."""
        if self._rows is None:
            group, (axis, _) = self._group, self._channels or (0, ())
            group.begin()
            self._rows = [None] * len(group.devices)
            for sink in group.active:
                parts = [group.send(partial(group.rows, self._parts[q], sink), q, sink, True) for q in group.ranks]
                with tf.device(group.devices[sink]):
                    self._rows[sink] = tf.concat(parts, axis)
        return self._rows

    @property
    def whole(self) -> Parts:
        """All of it, on every device."""
        if self._whole is None:
            group = self._group
            sources, axis = (group.ranks, self._channels[0]) if self._channels else (group.active, 0)
            group.begin()
            self._whole = []
            for sink in group.ranks:
                parts = [group.send(partial(tf.identity, self._parts[q]), q, sink, True) for q in sources]
                with tf.device(group.devices[sink]):
                    self._whole.append(tf.concat(parts, axis) if len(parts) > 1 else tf.identity(parts[0]))
        return self._whole

    def add_by_rows(self, gradients: Parts) -> None:
        """Of what had each device's own rows."""
        self._by_rows = self._summed(self._by_rows, gradients)

    def add_by_whole(self, gradients: Parts) -> None:
        """Of what had all of it, on each device in part."""
        self._by_whole = self._summed(self._by_whole, gradients)

    def _summed(self, before: Parts | None, gradients: Parts) -> Parts:
        if before is None:
            return list(gradients)
        total = []
        for device, a, b in zip(self._group.devices, before, gradients, strict=True):
            with tf.device(device):
                total.append(b if a is None else a if b is None else a + b)
        return total

    @property
    def is_reached(self) -> bool:
        """Whether there is a gradient."""
        return self._by_rows is not None or self._by_whole is not None

    def gradient(self) -> Parts:
        """The gradient in the layout in which the value was made."""
        group, found = self._group, None
        if self._by_whole is not None:
            of_device, sinks = self._by_whole, group.ranks if self._channels else group.active
            group.begin()
            found = [None] * len(group.devices)
            for sink in sinks:
                parts = [group.send(partial(self._part, of_device[q], sink), q, sink, False) for q in group.ranks]
                with tf.device(group.devices[sink]):
                    found[sink] = in_order(parts)
        if self._by_rows is None:
            return found or []
        if not self._channels:
            return self._summed(found, self._by_rows)
        by_rows = self._by_rows
        group.begin()
        exchanged: Parts = []
        for sink in group.ranks:
            parts = [group.send(partial(self._part, by_rows[q], sink), q, sink, False) for q in group.active]
            with tf.device(group.devices[sink]):
                exchanged.append(tf.concat(parts, 0) if len(parts) > 1 else parts[0])
        return self._summed(found, exchanged)

    def _part(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """What a device made of the value: its rows or its channels."""
        if not self._channels:
            return self._group.rows(tensor, rank)
        axis, channels = self._channels
        own = channels[rank]
        return tensor[(slice(None),) * axis + (slice(own.start, own.stop),)]
