"""Settings of Python's interpreter while a pipeline runs: its garbage collector, and its switch interval."""

from __future__ import annotations

import gc
import sys
import threading
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


SHORT_S = 5e-4  # a stage whose inputs are there must not wait Python's usual 5 ms for its turn

_LOCK = threading.Lock()
_holders: set[int] = set()
_usual_s = 0.0


def shorten(holder: object) -> None:
    """Shorten the interval until ``holder`` and all other holders have called ``let_go``."""
    global _usual_s
    with _LOCK:
        if not _holders:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(SHORT_S)
        _holders.add(id(holder))


def let_go(holder: object) -> None:
    """Restore the interval if no other holder is left; does nothing for an object that is not a holder."""
    with _LOCK:
        if id(holder) in _holders:
            _holders.discard(id(holder))
            if not _holders:
                sys.setswitchinterval(_usual_s)
