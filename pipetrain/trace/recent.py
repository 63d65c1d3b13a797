"""The newest records of one kind, of a run that may never end."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np

from pipetrain.trace.columns import Columns

CHUNK = 1 << 10  # records that are kept as tuples, before they are made columns of

Own = TypeVar("Own", bound=Columns[Any])


class Recent(Generic[Own]):
    """Takes records one by one, and keeps the newest as columns; for one thread at a time.

    Args:
        kind: of columns.
        count: how many are kept; with 0 there is no record. Meanwhile there may be a quarter more.
    """

    def __init__(self, kind: type[Own], count: int) -> None:
        self._kind, self._count = kind, count
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._parts: list[Own] = []
        self._packed = 0  # records in these
        self._new: list[Any] = []

    def append(self, record: Any) -> None:
        """Take one record, newer than all so far."""
        if self._count:
            self._new.append(record)
            if len(self._new) == CHUNK:
                self._pack()

    def extend(self, records: Own) -> None:
        """Take several, in order."""
        self._pack()
        self._add(records)

    def columns(self) -> Own:
        """What is kept, the oldest first."""
        self._pack()
        self._join()
        return self._parts[0] if self._parts else self._kind.of(())

    def _pack(self) -> None:
        new, self._new = self._new, []
        if new:
            self._add(self._kind.of(new))

    def _add(self, records: Own) -> None:
        if self._count and len(records):
            self._parts.append(records)
            self._packed += len(records)
            if self._packed > self._count + self._count // 4:
                self._join()

    def _join(self) -> None:
        if len(self._parts) > 1 or self._packed > self._count:
            joined = self._kind.joined(self._parts)
            self._parts = [joined[np.arange(max(0, len(joined) - self._count), len(joined))]]  # a copy: no more is kept
            self._packed = len(self._parts[0])
