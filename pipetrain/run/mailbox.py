"""A bounded queue between two threads that can be closed from outside."""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Closed(Exception):
    """The mailbox was closed: the pipeline is being stopped."""


class Mailbox(Generic[Item]):
    """First in, first out. ``close`` wakes every waiting thread with ``Closed``, so nobody waits for ever."""

    def __init__(self, capacity: float = math.inf) -> None:
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: Item) -> None:
        """Add an item; waits while the mailbox is full. Raises Closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            self._check_open()
            self._items.append(item)
            self._changed.notify_all()

    def peek(self) -> Item:
        """The oldest item, left in place; waits while the mailbox is empty. Raises Closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            self._check_open()
            return self._items[0]

    def get(self) -> Item:
        """Take the oldest item; waits while the mailbox is empty. Raises Closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            self._check_open()
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Wake everyone; from now on every call raises Closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._items)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed
