"""How long profiling may take, and where on disk its results are kept."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipetrain.plan.choice import Choice

BUDGET_S = 20.0


class Budget:
    """A stopwatch that says whether there is time for more.

    Args:
        seconds: that all may take; None or infinity for as many as it takes.
        now_s: a clock, in seconds.

    ``is_short``: whether the answer has ever been no, so that something was left out.

    Raises:
        TypeError, ValueError: for what is no number of seconds above 0.
    """

    def __init__(self, seconds: float | None = None, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = checked_budget(seconds)
        self._now_s, self._start_s = now_s, now_s()
        self.is_short = False

    @property
    def spent_s(self) -> float:
        """Seconds since it was made."""
        return self._now_s() - self._start_s

    def has(self, part: float, needed_s: float = 0.0) -> bool:
        """Whether no more than this part of the seconds is over when something is done that takes ``needed_s``."""
        if self.spent_s + needed_s <= part * self.seconds:
            return True
        self.is_short = True
        return False


def checked_budget(budget_s: float | None) -> float:
    """The seconds, infinity for None. Raises TypeError or ValueError for what is no number of seconds above 0."""
    if budget_s is None:
        return math.inf
    try:
        if not isinstance(budget_s, bool) and float(budget_s) > 0:
            return float(budget_s)
    except (TypeError, ValueError):
        raise TypeError(
            f"A budget is a number of seconds. Received: budget_s={budget_s!r}. Try {BUDGET_S:g}, or None for no limit."
        ) from None
    raise ValueError(
        f"A profile takes some time. Received: budget_s={budget_s!r}. Try {BUDGET_S:g}, or None for no limit."
    )


NOWHERE = Path(os.devnull)  # below it nothing can be read or written


def folder() -> Path:
    """``$XDG_CACHE_HOME/pipetrain``, or ``~/.cache/pipetrain``; there need not be such a folder.

    Where the user has no home, what is read or written there is an OSError: nothing is kept, as on a full disk. A
    relative ``XDG_CACHE_HOME`` is ignored, as its standard says.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = _home() / ".cache"
    return (cache if cache.is_absolute() else NOWHERE) / "pipetrain"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and the system does not know the user: a container, a batch job
        return NOWHERE


class KeptTrials:
    """The trials of the ways among which a choice cannot tell the fastest.

    They are known again by what was predicted, to the last digit: by the very profile, that is. Links between processes
    are measured by every program, so there they are not.

    Args:
        choice: with these ways.
        within: all else on which their seconds depend.

    ``seconds`` of a minibatch of each way, empty where they are not known.
    """

    def __init__(self, choice: Choice, within: Sequence[Any]) -> None:
        ways = [(sorted(way.told.items()), way.step_s, way.memory_bytes) for way in choice.near]
        digest = hashlib.sha256(repr((choice.batch_size, ways, within)).encode()).hexdigest()[:32]
        self._path = folder() / f"trials-{digest}.json"
        self.seconds: list[float] = []
        with suppress(OSError, TypeError, ValueError):  # not there, or not whole
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self.seconds = [float(each) for each in found] if len(found) == len(ways) else []

    def keep(self, seconds: Sequence[float]) -> None:
        """Write them down."""
        part = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # a folder that cannot be written is no reason not to train
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_text(json.dumps([*seconds]), encoding="utf-8")
                part.replace(self._path)
            finally:
                part.unlink(missing_ok=True)
