"""Many records of one kind, kept as a NumPy array for each field: small, quick to sum, and read as a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

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
