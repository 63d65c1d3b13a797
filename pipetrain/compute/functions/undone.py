"""Changes to objects that are undone if they are not completed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
