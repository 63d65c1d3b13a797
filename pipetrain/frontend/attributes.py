"""Attributes that have another value for a while, or none."""

from __future__ import annotations

from typing import Any, TypeVar

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
