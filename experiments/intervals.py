"""Means over repetitions, and how sure they are: 95% intervals by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

# t at which 2.5% lie above, for 1, 2, ... degrees of freedom.
QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
NORMAL = 1.959964  # what they come down to


def quantile(freedom: int) -> float:
    """The t of a 95% interval, to three digits. Raises ValueError for less than one degree of freedom."""
    if freedom < 1:
        raise ValueError(f"No spread can be told. Received: freedom={freedom}. Try at least two values.")
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    z, n = NORMAL, freedom  # the first terms of t's expansion in 1/n about the normal quantile
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half width of its 95% interval; the half width of a single value is None.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("There is no mean of nothing. Received: values=(). Try at least one.")
    mean = fmean(values)
    if len(values) == 1:
        return mean, None
    return mean, quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def shown(values: Sequence[float], digits: int, signed: bool = False) -> str:
    """For people: ``0.8123 ± 0.0040``; of a single value the value alone, and ``-`` of none."""
    if not values:
        return "-"
    mean, half = interval(values)
    said = f"{mean:{'+' if signed else ''}.{digits}f}"
    return said if half is None else f"{said} ± {half:.{digits}f}"
