"""Attributes that have another value for a while."""

from __future__ import annotations

from typing import Any


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
