"""Packs of a plan as messages, and messages on their way between devices, all within one traced function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.transfers.record import Record, What
from pipetrain.schemes.splitting import rows_of
from pipetrain.schemes.transfers.plan import Pack, Phase


class MessageLayout:
    """How a pack's values become one flat message for each of their types, and values again.

    A value that is alone in its message travels as it is.

    Args:
        pack: the variables' numbers.
        like: the spec of each variable, by its number.
    """

    def __init__(self, pack: Pack, like: Mapping[int, tf.TensorSpec]) -> None:
        self._pack, self._like = pack, like
        types = dict.fromkeys(like[n].dtype for n in pack.variables)
        self._together = [[n for n in pack.variables if like[n].dtype == dtype] for dtype in types]

    def messages(self, values: Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
        """Of the values by the variables' numbers."""
        for n in self._pack.variables:
            values[n].set_shape(self._like[n].shape)  # which a trace need not have found
        if self._pack.chunks > 1:
            (n,) = self._pack.variables
            rows = rows_of(_elements(self._like[n]), self._pack.chunk, self._pack.chunks)
            return [tf.slice(flat(values[n]), [rows.start], [len(rows)])]
        return [
            values[numbers[0]] if len(numbers) == 1 else tf.concat([flat(values[n]) for n in numbers], 0)
            for numbers in self._together
        ]

    def values(self, messages: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        """The values, or the chunk of one, by the variables' numbers."""
        if self._pack.chunks > 1:
            return {self._pack.variables[0]: messages[0]}
        found: dict[int, tf.Tensor] = {}
        for numbers, message in zip(self._together, messages, strict=True):
            if len(numbers) == 1:
                found[numbers[0]] = message
                continue
            parts = tf.split(message, [_elements(self._like[n]) for n in numbers])
            found |= {n: shaped(part, self._like[n].shape) for n, part in zip(numbers, parts, strict=True)}
        return found


class Received:
    """The values of a phase's packs as they arrive at one device; chunks are put together.

    Args:
        like: the spec of each variable, by its number.
    """

    def __init__(self, like: Mapping[int, tf.TensorSpec]) -> None:
        self._like, self._values = like, dict[int, Any]()
        self._chunks: dict[int, dict[int, tf.Tensor]] = {}

    def add(self, pack: Pack, values: Mapping[int, Any]) -> None:
        """What a pack brought."""
        if pack.chunks == 1:
            self._values.update(values)
            return
        (n,) = pack.variables
        chunks = self._chunks.setdefault(n, {})
        chunks[pack.chunk] = values[n]
        if len(chunks) == pack.chunks:
            whole = tf.concat([chunks[k] for k in range(pack.chunks)], 0)
            self._values[n] = shaped(whole, self._like[n].shape)

    @property
    def values(self) -> dict[int, Any]:
        """Those that are complete, by the variables' numbers."""
        return self._values


class Order:
    """Sends a phase's packs one after another, each after the acknowledgements that it waits for.

    A message leaves when the pack that it awaits has arrived at all its receivers. They say so by control
    edges to the sender's device: an edge on the sender's side alone would order nothing, as a message that is ready is
    sent when it is asked for.

    Args:
        phase: whose packs are sent.
        kind: what is sent, for the record.
        record: of what is sent and arrives, if there is to be one.
    """

    def __init__(self, phase: Phase, kind: What, record: Record | None = None) -> None:
        self._phase, self._kind, self._record = phase, kind, record
        self._awaited = phase.awaited
        self._arrived: list[list[tf.Operation]] = []

    def packs(self) -> Iterator[Pack]:
        """The packs; what is sent after each of them is given, is of it."""
        for pack in self._phase.packs:
            self._arrived.append([])
            yield pack

    def send(self, tensor: tf.Tensor, source: str, sink: str, waits: bool = True) -> tf.Tensor:
        """The tensor, a part of the current pack, on another device; there at once if it ``waits`` for no others."""
        if source == sink:
            return tensor
        place = self._awaited[len(self._arrived) - 1]
        awaited = self._arrived[place] if waits and place is not None else []
        there = sent(tensor, source, sink, awaited)
        arrived = there
        if self._record is not None:  # the acknowledgement then waits for the time to be noted
            arrived = self._record.add(self._kind, len(self._arrived) - 1, source, sink, there)
        self._arrived[-1].append(arrived.op)
        return there


def sent(tensor: tf.Tensor, source: str, sink: str, awaited: Sequence[tf.Operation]) -> tf.Tensor:
    """The tensor on another device, sent after what is awaited; on its own device it is there already."""
    if source == sink:
        return tensor
    with tf.device(source), tf.control_dependencies(awaited):
        leaving = tf.identity(tensor)
    with tf.device(sink):
        return tf.identity(leaving)


def flat(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor's values in one dimension, without an operation if they are that already."""
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1])


def shaped(values: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Values of one dimension in this shape, without an operation if it has one dimension, too."""
    return values if shape.rank == 1 else tf.reshape(values, shape)


def _elements(spec: tf.TensorSpec) -> int:
    return int(spec.shape.num_elements())
