"""What other machines on the same host take of this one's processors, so that it can be measured when they take none.

Linux counts the time for which a virtual processor had work but was not run ("steal").
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

TOLERATED = 0.02  # of the time that processors worked or would have
TRIES = 4
Value = TypeVar("Value")


def undisturbed(measure: Callable[[], Value]) -> Value:
    """What ``measure`` gives when hardly any time was stolen; of ``TRIES`` measurements the one with least stolen."""
    found: list[tuple[float, Value]] = []
    while not found or (found[-1][0] > TOLERATED and len(found) < TRIES):
        since = ticks()
        value = measure()
        found.append((stolen_part(since), value))
    return min(found, key=lambda each: each[0])[1]


def stolen_part(since: tuple[int, int]) -> float:
    """What part of the time that processors worked or would have was stolen since ``ticks()`` gave this."""
    stolen, worked = (now - before for now, before in zip(ticks(), since, strict=True))
    return stolen / max(stolen + worked, 1)


def ticks() -> tuple[int, int]:
    """Of all processors since the machine's start: stolen and at work; zeros where that is not known."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0, 0
    user, nice, system, _idle, _waiting, _irq, _softirq, stolen = map(int, path.read_text().split()[1:9])
    return stolen, user + nice + system
