"""Python's switch interval, short while any pipeline is at work: one for the whole process."""

from __future__ import annotations

import sys
import threading

SHORT_S = 5e-4  # a stage whose inputs are there must not wait Python's usual 5 ms for its turn

_LOCK = threading.Lock()
_holders: set[int] = set()
_usual_s = 0.0


def shorten(holder: object) -> None:
    """Shorten it until ``holder`` lets go, and all others that asked for it."""
    global _usual_s
    with _LOCK:
        if not _holders:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(SHORT_S)
        _holders.add(id(holder))


def let_go(holder: object) -> None:
    """Let it be as before the first who asked, unless somebody still holds it; nothing for who does not."""
    with _LOCK:
        if id(holder) in _holders:
            _holders.discard(id(holder))
            if not _holders:
                sys.setswitchinterval(_usual_s)
