"""Objects that are as before if what changes them does not come to its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pipetrain.compute.keras_private import tracked_ids


@contextmanager
def undone(objects: Sequence[Any]) -> Iterator[None]:
    """What is done within to attributes of these objects of Keras, and to lists there, is undone by an exception.

    Half built, with variables that have no value yet, Keras would take them for whole, or add to them.
    """
    before = [(vars(each), dict(vars(each)), _copies(each)) for each in objects]
    try:
        yield
    except BaseException:
        for attributes, values, copies in before:
            attributes.clear()
            attributes.update(values)
            for original, copied in copies:
                original.clear()
                (original.update if isinstance(original, set) else original.extend)(copied)
        raise


def _copies(each: Any) -> list[tuple[Any, Any]]:
    """Every list of an object, and what its tracker knows, with a copy."""
    found = [value for value in vars(each).values() if type(value) is list]
    found += tracked_ids(each)
    return [(value, value.copy()) for value in found]
