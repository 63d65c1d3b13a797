"""How values get from one thread and device to another: queues that can be closed, and copies of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import tensorflow as tf

from pipetrain.compute.cores import is_remote
from pipetrain.compute.tensorflow_private import elements_of

Item = TypeVar("Item")
_NOTHING: Any = object()


class Closed(Exception):
    """The mailbox was closed: the pipeline is being stopped."""


class Mailbox(Generic[Item]):
    """First in, first out, for one reader. ``close`` wakes it with ``Closed``, so that no thread waits for ever."""

    def __init__(self) -> None:
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._next: Item = _NOTHING
        self._closed = False

    def put(self, item: Item) -> None:
        """Add an item. Raises Closed."""
        if self._closed:
            raise Closed
        self._items.put(item)

    def peek(self) -> Item:
        """The oldest item, left in place; waits while the mailbox is empty. Raises Closed."""
        if self._next is _NOTHING and not self._closed:
            self._next = self._items.get()
        if self._closed:
            raise Closed
        return self._next

    def get(self) -> Item:
        """Take the oldest item; waits while the mailbox is empty. Raises Closed."""
        item, self._next = self.peek(), _NOTHING
        return item

    def close(self) -> None:
        """Wake the reader; from now on every call raises Closed."""
        self._closed = True
        self._items.put(_NOTHING)

    def __len__(self) -> int:
        return self._items.qsize() + (self._next is not _NOTHING)


def transfer(tensor: tf.Tensor, device: str) -> tf.Tensor:
    """The tensor for a reader on another device; TensorFlow does the copy. CPU devices of one process need none.

    Devices of other processes need none either: the call that reads a tensor there copies it once. A separate copy
    would need two more messages, for a call and for the release of a tensor, and the sender would wait for all earlier
    calls of the reader's process.
    """
    if not _needs_copy(tensor.device, device):
        return tensor
    with tf.device(device):
        return tf.identity(tensor)


def moved(gradients: list[Any], device: str) -> list[Any]:
    """Gradients for a reader on another device; None, for a weight that has none, stays None."""

    def move(tensor: Any) -> Any:
        return None if tensor is None else transfer(tensor, device)

    return list(tf.nest.map_structure(move, gradients, expand_composites=True))


def here(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors, those on devices of other processes copied to this one."""
    return [transfer(each, "/device:CPU:0") if is_remote(each.device) else each for each in tensors]


@cache
def _needs_copy(source: str, device: str) -> bool:
    """Whether a tensor on the one device must be copied for a reader on the other."""
    if is_remote(device) or (source.endswith(device) and not is_remote(source)):
        return False
    return not (_shares_memory(source) and _shares_memory(device))


def _shares_memory(device: str) -> bool:
    return "device:CPU:" in device and not is_remote(device)


def size_bytes(tensors: Iterable[tf.Tensor | None]) -> int:
    """The bytes of all elements of the tensors.

    Reading a tensor's shape gives up Python's global lock for every dimension; reading its number of elements, once.
    """
    return sum(elements_of(each) * each.dtype.size for each in tensors if each is not None)
