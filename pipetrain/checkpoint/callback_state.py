"""What callbacks remember from one epoch to another, so that it can be kept in a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipetrain.checkpoint.arrays import array_of
from pipetrain.checkpoint.store import Checkpoint
from pipetrain.compute.keras_private import CALLBACK_STATE


def remembered(callbacks: list[Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What callbacks know that decides on what they do later: in JSON, and lists of arrays."""
    plain: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for key, callback, name in _attributes(callbacks):
        value = getattr(callback, name)
        if isinstance(value, list):
            arrays |= {f"{key}/{n}": array_of(each) for n, each in enumerate(value)}
        else:
            plain[key] = float(value) if isinstance(value, np.generic) else value
    plain |= {key: each.get_state() for key, each in _named(callbacks) if hasattr(each, "get_state")}
    return plain, arrays


def recall(callbacks: list[Any], found: Checkpoint) -> None:
    """Give callbacks back what ``remembered`` took from them."""
    plain = found.about["callbacks"]
    for key, callback, name in _attributes(callbacks):
        listed = [found.arrays[each] for each in found.arrays if each.startswith(f"{key}/")]
        if listed or key in plain:
            setattr(callback, name, listed or plain[key])
    for key, each in _named(callbacks):
        if hasattr(each, "set_state") and key in plain:
            each.set_state(plain[key])


def _attributes(callbacks: list[Any]) -> Iterator[tuple[str, Any, str]]:
    """Key, callback and attribute of what Keras' own callbacks remember."""
    for key, callback in _named(callbacks):
        for kind, names in CALLBACK_STATE.items():
            if isinstance(callback, kind):
                yield from ((f"{key}/{name}", callback, name) for name in names)


def _named(callbacks: list[Any]) -> Iterator[tuple[str, Any]]:
    """Every callback by its class, and which of the class it is: others may come between."""
    seen: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        yield f"callback/{name}/{seen[name]}", callback
        seen[name] += 1
