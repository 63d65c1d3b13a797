"""What holds for a while: attributes with another value, what tracing builds unless it is interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pipetrain.compute.keras_private import keep_to_come, tracked_ids, variables_to_come


@contextmanager
def undone(objects: Sequence[Any]) -> Iterator[None]:
    """Undo changes to the attributes of these Keras objects, and to their lists, if an exception is raised.

    Keras would treat a partly built object, whose variables have no values yet, as complete, or add to it.
    """
    before = [(vars(each), dict(vars(each)), _copies(each)) for each in objects]
    to_come = variables_to_come().copy()
    try:
        yield
    except BaseException:
        keep_to_come(to_come)  # else the next scope, of whatever model, would begin with those of this one
        for attributes, values, copies in before:
            attributes.clear()
            attributes.update(values)
            for original, copied in copies:
                original.clear()
                (original.update if isinstance(original, set) else original.extend)(copied)
        raise


def _copies(each: Any) -> list[tuple[Any, Any]]:
    """Every list of an object, and what its tracker has recorded, with a copy."""
    found = [value for value in vars(each).values() if type(value) is list]
    found += tracked_ids(each)
    return [(value, value.copy()) for value in found]


Value = TypeVar("Value")


class Meanwhile:
    """A context in which these attributes of an object, from which Keras' loop takes what to do, have these values.

    Args:
        target: the object, which has these attributes.
        values: theirs, by name.
    """

    def __init__(self, target: Any, **values: Any) -> None:
        self._target, self._values = target, values
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._before = {name: getattr(self._target, name) for name in self._values}
        self._set(self._values)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._target, name, value)


def known(value: Value | None) -> Value:
    """The value of an attribute that has one by now. Raises RuntimeError if it is None."""
    if value is None:
        raise RuntimeError("Something is asked of a model before it is compiled, or fit has begun. Try that first.")
    return value
