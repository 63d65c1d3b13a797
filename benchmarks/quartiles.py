"""What rounds say of a ratio: its median, and between which values half of the rounds lie."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def quartiles(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile; of one round all are its value."""
    if len(ratios) == 1:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high
