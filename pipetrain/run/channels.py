"""Rows from the replicas of one stage to those of the next: each sends every other the rows that both need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import is_remote
from pipetrain.compute.functions.kernels import Kernels
from pipetrain.compute.functions.stage_values import BoundaryTensors, joined_rows
from pipetrain.compute.tensorflow_private import current_device
from pipetrain.compute.transfers.compression import CutMessages
from pipetrain.run.gradient_exchange import GradientExchange, Mailbox, Reduction, SharedGradients, size_bytes, transfer
from pipetrain.schemes.splitting import RowsPiece, rows_of, stream_of
from pipetrain.trace.records import Recent, Transfer, Transfers, What

Rows = BoundaryTensors | list[tf.Tensor] | None
Message = TypeVar("Message")
_SLICING = threading.Lock()


class Destination(NamedTuple):
    """A neighbour's mailbox and the device its reader works on."""

    mailbox: Mailbox[Any]
    device: str


class CutFunctions:
    """One way over a cut, on which values are compressed: functions that are traced on the device that calls them.

    Args:
        messages: of the cut.
        microbatches: of a minibatch.
        before: how many minibatches have been trained on.
    """

    def __init__(self, messages: CutMessages, microbatches: int, before: int) -> None:
        self._messages, self._microbatches, self._before = messages, microbatches, before
        self._encode: Callable[..., Rows] | None = None
        self._decode: Callable[..., Rows] | None = None

    def encoded(self, values: Rows, microbatch: int, ends: tuple[int, int, int, int]) -> Rows:
        """The values as messages; ``ends`` are the sender's and the receiver's numbers, and how many there are."""
        sender, receiver, *counts = ends
        minibatch, number = divmod(microbatch, self._microbatches)
        piece = RowsPiece(sender, receiver, 0, 0, 0)
        numbers = np.array([self._before + minibatch, stream_of(number, piece, (counts[0], counts[1]))], np.int64)
        if self._encode is None:

            def encode(values: Any, numbers: tf.Tensor) -> Any:
                return self._messages.encoded(values, numbers[0], numbers[1])

            self._encode = Kernels().op(encode, _any_sizes(values), tf.TensorSpec([2], tf.int64))
        return self._encode(values, tf.constant(numbers))

    def decoded(self, messages: Rows) -> Rows:
        """The values again."""
        if messages is None:
            return None
        if self._decode is None:
            self._decode = Kernels().op(self._messages.decoded, _any_sizes(messages))
        return self._decode(messages)


def _any_sizes(values: Rows) -> Any:
    """Specs of tensors that have these numbers of dimensions."""
    return tf.nest.map_structure(
        lambda each: None if each is None else tf.TensorSpec([None] * each.shape.rank, each.dtype), values
    )


class Sender:
    """Sends from one of ``replicas`` replicas to all replicas of a neighbouring stage, one message to each.

    ``kept`` transfers are recorded, the newest; ``crossing`` compresses them.
    """

    def __init__(
        self,
        destinations: Sequence[Destination],
        replica: int = 0,
        replicas: int = 1,
        kept: int = 0,
        crossing: CutFunctions | None = None,
    ) -> None:
        self._destinations, self._replica, self._replicas = list(destinations), replica, replicas
        self._sent, self._crossing = Recent(Transfers, kept), crossing

    def send(self, message: Callable[[Rows], Any], values: Rows, rows: int, microbatch: int | None = None) -> None:
        """Send ``values``, this replica's rows of a microbatch of ``rows``; None if it has none.

        The transfer is recorded if its ``microbatch`` is given.
        """
        mine = rows_of(rows, self._replica, self._replicas)
        for replica, destination in enumerate(self._destinations):
            theirs = _part(values, mine, rows_of(rows, replica, len(self._destinations)))
            if theirs is not None and microbatch is not None and self._crossing is not None:
                ends = self._replica, replica, self._replicas, len(self._destinations)
                theirs = self._crossing.encoded(theirs, microbatch, ends)
            if theirs is None or microbatch is None or is_remote(destination.device):  # sent by the call that reads it
                destination.mailbox.put(message(moved_to(destination.device, theirs)))
                continue
            start_s = time.perf_counter()
            moved = moved_to(destination.device, theirs)
            end_s = time.perf_counter()
            destination.mailbox.put(message(moved))  # before the bookkeeping: somebody may wait for it
            size = _size_bytes(moved)
            self._sent.append(Transfer("F", microbatch, 0, self._replica, 0, replica, size, start_s, end_s))

    def transfers(self, op: What, stage: int, to_stage: int) -> Transfers:
        """The recorded transfers, which were of this action, from the one stage to the other."""
        sent = self._sent.columns()
        ops, stages = np.full_like(sent.op, op), np.full_like(sent.from_stage, stage)
        return replace(sent, op=ops, from_stage=stages, to_stage=np.full_like(sent.to_stage, to_stage))

    def close(self) -> None:
        """Signal that no more messages will come."""
        for destination in self._destinations:
            destination.mailbox.put(None)


class Receiver(Generic[Message]):
    """Receives the messages of all replicas of a neighbouring stage, ``opens`` each, and joins them to one."""

    def __init__(
        self,
        boxes: Sequence[Mailbox[Any]],
        join: Callable[[list[Any]], Message],
        opens: Callable[[Any], Any] | None = None,
    ) -> None:
        self._boxes, self._join, self._opens = list(boxes), join, opens

    def peek(self) -> Any:
        """The first replica's next message, left in place; None at the end."""
        return self._boxes[0].peek()

    def get(self) -> Message:
        """The next message, with its parts in the order of rows."""
        messages = [box.get() for box in self._boxes]
        if self._opens is not None:
            messages = [self._opens(each) for each in messages]
        return messages[0] if len(messages) == 1 else self._join(messages)


class Channels(NamedTuple):
    """A stage's connections: microbatches come into ``inbox``, gradients into ``returns``; None at the ends.

    A None in the inbox says that no more microbatches will come. ``reduction`` is the all-reduce among the stage's
    replicas, ``summaries`` the exchange with all stages where an update depends on the gradients of all, ``shared``
    those of the gradients of weights that it shares with other stages. ``together``: whether the stages of a device
    update when all of them have a minibatch's gradients, since one may wait for another.
    """

    inbox: Receiver[Any]
    returns: Receiver[list[tf.Tensor] | None]
    above: Sender | None
    below: Sender | None
    reduction: Reduction
    summaries: GradientExchange | None = None
    shared: Sequence[SharedGradients] = ()
    together: bool = False


def take(data: Any, part: range, rows: int) -> Any:
    """The rows ``part`` of nested tensors that have ``rows``; None stays None."""
    if len(part) == rows:
        return data
    return tf.nest.map_structure(lambda each: None if each is None else _sliced(each, part.start, part.stop), data)


def _sliced(tensor: tf.Tensor, start: int, stop: int) -> tf.Tensor:
    """``tensor[start:stop]``, in this process by one thread at a time.

    TensorFlow 2.21 confuses the bounds of two threads that slice at the same time on the same logical CPU device,
    unless it is the first one. A worker may be lost while it slices: nobody waits for that.
    """
    with nullcontext() if is_remote(current_device()) else _SLICING:
        return tensor[start:stop]


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts one after another; None if none has any."""
    present = [part for part in parts if part is not None]
    rows: Rows = joined_rows(present) if present else None
    return rows


def _part(values: Rows, mine: range, theirs: range) -> Rows:
    """The values for the rows ``theirs``, of values for the rows ``mine``."""
    if mine == theirs or values is None:
        return values
    first, end = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
    if first >= end:
        return None

    def cut(tensor: Any) -> Any:
        if tensor is None:
            return None
        per_row, rest = divmod(tensor.shape[0], len(mine)) if tensor.shape.rank else (0, 1)
        if rest:
            raise ValueError(
                f"What crosses from or to a replicated stage must have the batch first. Received: a tensor of shape "
                f"{tuple(tensor.shape)} for {len(mine)} rows. Try a cut somewhere else, or replicas=1 there."
            )
        return _sliced(tensor, (first - mine.start) * per_row, (end - mine.start) * per_row)

    return tf.nest.map_structure(cut, values)


def _size_bytes(values: Rows) -> int:
    if isinstance(values, BoundaryTensors):
        return size_bytes(values.tensors) + size_bytes(values.masks)
    return size_bytes(values or ())


def moved_to(device: str, values: Rows) -> Rows:
    """The values for a reader on this device."""
    if isinstance(values, BoundaryTensors):
        masks = [None if mask is None else transfer(mask, device) for mask in values.masks]
        return BoundaryTensors([transfer(tensor, device) for tensor in values.tensors], masks)
    return None if values is None else [transfer(tensor, device) for tensor in values]
