"""A queue between two threads that can be closed from outside."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any, Generic, TypeVar

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
