"""Python's switch interval, which is short while any pipeline runs; it belongs to the whole process."""

from __future__ import annotations

import sys
import threading

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
