"""The seconds that a profile may take, and what is left out to keep to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

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
