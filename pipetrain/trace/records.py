"""What a trace is made of: actions of stages, and what they sent, one by one, as columns, and the newest of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from pipetrain.schemes.actions import OPERATIONS, Op

CHUNK = 1 << 14  # records that are made at once while iterating
Record = TypeVar("Record", bound=tuple[Any, ...])
Own = TypeVar("Own", bound="Columns[Any]")


class Names:
    """Names that repeat: for each record, the ``index`` into the different ``names``."""

    def __init__(self, index: NDArray[np.int32], names: tuple[str, ...]) -> None:
        self.index, self.names = index, names

    @classmethod
    def of(cls, each: Iterable[str]) -> Names:
        """Number the names in the order in which they first come."""
        known: dict[str, int] = {}
        index = [known.setdefault(name, len(known)) for name in each]
        return cls(np.array(index, dtype=np.int32), tuple(known))

    @classmethod
    def joined(cls, parts: Sequence[Names]) -> Names:
        """All parts' names one after another."""
        if all(part.names == parts[0].names for part in parts):
            return cls(np.concatenate([part.index for part in parts]), parts[0].names)
        known = {name: n for n, name in enumerate(dict.fromkeys(name for part in parts for name in part.names))}
        numbers = [np.array([known[name] for name in part.names], dtype=np.int32) for part in parts]
        return cls(np.concatenate([of[part.index] for of, part in zip(numbers, parts, strict=True)]), tuple(known))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, which: Any) -> Any:
        """The name of one record; the Names of several."""
        picked = self.index[which]
        return Names(picked, self.names) if isinstance(picked, np.ndarray) else self.names[picked]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names) and self.tolist() == other.tolist()

    def tolist(self) -> list[str]:
        """Every record's name."""
        return [self.names[n] for n in self.index.tolist()]


class Columns(Sequence[Record], Generic[Record]):
    """A sequence of named tuples of the type ``record``, made when they are asked for.

    A subclass is a frozen dataclass whose fields are the record's, in order: a NumPy array or Names each. ``dtypes``
    are theirs, None for Names.
    """

    record: ClassVar[Any]
    dtypes: ClassVar[tuple[Any, ...]]

    @classmethod
    def of(cls: type[Own], records: Iterable[Any]) -> Own:
        """The columns of these records."""
        if isinstance(records, cls):
            return records
        given = list(zip(*records, strict=True)) or [()] * len(cls.dtypes)
        columns = zip(given, cls.dtypes, strict=True)
        return cls(*(Names.of(each) if dtype is None else np.array(each, dtype=dtype) for each, dtype in columns))

    @classmethod
    def joined(cls: type[Own], parts: Sequence[Own]) -> Own:
        """All parts' records one after another."""
        if not parts:
            return cls.of(())
        columns = zip(*(part.columns for part in parts), strict=True)
        return cls(*(Names.joined(each) if isinstance(each[0], Names) else np.concatenate(each) for each in columns))

    @property
    def columns(self) -> list[Any]:
        """The arrays, in the order of the record's fields."""
        return [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self: Own, index: int) -> Record: ...
    @overload
    def __getitem__(self: Own, index: slice | NDArray[Any]) -> Own: ...
    def __getitem__(self: Own, index: Any) -> Any:
        """One record; or, of a slice, a mask or an array of indices, the columns."""
        picked = [column[index] for column in self.columns]
        if isinstance(index, slice | np.ndarray):
            return type(self)(*picked)
        return self.record(*(each.item() if isinstance(each, np.generic) else each for each in picked))

    def __iter__(self) -> Iterator[Record]:
        for first in range(0, len(self), CHUNK):
            part = [column[first : first + CHUNK].tolist() for column in self.columns]
            yield from map(self.record, *part)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = zip(self.columns, other.columns, strict=True)
        return all(a == b if isinstance(a, Names) else np.array_equal(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]


Integers = NDArray[np.int32]
Seconds = NDArray[np.float64]
# activations, their gradients, weights' gradients to be summed over replicas, and over stages that share the weights;
# weights from a server
What = Literal["F", "B", "R", "S", "W"]
CATEGORIES = {op: operation.about for op, operation in OPERATIONS.items()}
OPS = {about: op for op, about in CATEGORIES.items()}
LONGEST = f"U{max(map(len, OPERATIONS))}"  # the type of their names
ENDING = [op for op, operation in OPERATIONS.items() if "weight gradients" in operation.makes]


class Span(NamedTuple):
    """One action of one replica of a stage, in seconds since the trace's start, and the version it began with."""

    op: Op
    stage: int
    microbatch: int
    device: str
    start_s: float
    end_s: float
    version: int
    replica: int = 0


class Transfer(NamedTuple):
    """What one replica of a stage sent to another, from when it was handed over to when it had arrived.

    In the trace of a run whose functions have all devices it lasts from the end of its action to its arrival, no time
    at all between processors of one process, where nothing is copied. Where a thread runs each device, the sender's
    copies: a transfer lies within the span of its action. The first stage's inputs are not recorded. In a simulated
    trace it overlaps with the sender's next actions.

    ``op`` is the kind of the transfer: ``F``, activations on their way down; ``B``, their gradients on the way up;
    ``R``, the reduction of weights' gradients among a stage's replicas, a transfer of each of them to its own stage,
    from its gradients being ready to the sums being there; ``S``, gradients of weights that stages share, on their way
    up to the first of these stages, and their sum over the stages on its way down; ``W``, weights that a worker gets
    from a parameter server, which is the replica of the same device. Of schemes that order their transfers ``R`` and
    ``W`` are single messages between two replicas, from when they left; ``pack`` is then the place of what is sent in
    the step's plan, and ``kept_s`` the time from its arrival to its first use, which only a simulation knows.
    """

    op: What
    microbatch: int
    from_stage: int
    from_replica: int
    to_stage: int
    to_replica: int
    size_bytes: int
    start_s: float
    end_s: float
    pack: int = 0
    kept_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Spans(Columns[Span]):
    """Spans as columns."""

    record: ClassVar[Any] = Span
    dtypes: ClassVar[tuple[Any, ...]] = (LONGEST, np.int32, np.int32, None, float, float, np.int32, np.int32)

    op: NDArray[np.str_]
    stage: Integers
    microbatch: Integers
    device: Names
    start_s: Seconds
    end_s: Seconds
    version: Integers
    replica: Integers


@dataclass(frozen=True, eq=False)
class Transfers(Columns[Transfer]):
    """Transfers as columns."""

    record: ClassVar[Any] = Transfer
    dtypes: ClassVar[tuple[Any, ...]] = ("U1", *[np.int32] * 5, np.int64, float, float, np.int32, float)

    op: NDArray[np.str_]
    microbatch: Integers
    from_stage: Integers
    from_replica: Integers
    to_stage: Integers
    to_replica: Integers
    size_bytes: NDArray[np.int64]
    start_s: Seconds
    end_s: Seconds
    pack: Integers
    kept_s: Seconds


TUPLES = 1 << 10  # records that are kept as tuples, before they are made columns of


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
            if len(self._new) == TUPLES:
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
