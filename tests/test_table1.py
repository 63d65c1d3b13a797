"""The paper's Table 1 as a command: intervals, gathering, the table, the figure, a run of it."""

from __future__ import annotations

import math

import pytest

from experiments import intervals


def test_intervals_are_students():
    """Three values 1, 2, 3: deviation 1, t = 4.303 at two degrees of freedom."""
    mean, half = intervals.interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert intervals.interval([5.0]) == (5.0, None)
    assert intervals.interval([5.0, 5.0]) == (5.0, 0.0)
    with pytest.raises(ValueError, match="no mean of nothing"):
        intervals.interval([])


def test_quantiles_go_on_without_a_jump():
    assert intervals.quantile(31) == pytest.approx(2.0395, abs=1e-4)
    assert intervals.quantile(120) == pytest.approx(1.9799, abs=1e-4)
    several = [intervals.quantile(n) for n in range(1, 200)]
    assert several == sorted(several, reverse=True)
    with pytest.raises(ValueError, match="freedom=0"):
        intervals.quantile(0)


def test_intervals_are_shown():
    assert intervals.shown([1.0, 2.0, 3.0], 2) == "2.00 ± 2.48"
    assert intervals.shown([0.5], 3) == "0.500"
    assert intervals.shown([], 3) == "-"
