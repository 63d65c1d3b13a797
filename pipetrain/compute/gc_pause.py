"""Pause Python's garbage collector during work that makes many long-lived objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Switch Python's garbage collector off, if it is on: it would visit a graph repeatedly while that is traced.

    Threads may pause it at once. One that finds it off leaves it as it is, so that whoever switched it off is the one
    who switches it on again; where two find it on, it is on when both have ended.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
