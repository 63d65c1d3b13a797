"""The memory that the plan names for every way to train, against that of real runs on four workers."""

from __future__ import annotations

import pytest

from benchmarks.memory_of_ways import MOMENTUM_ONLY, WAYS, Network, apart

ALL = [way for way in WAYS if way not in MOMENTUM_ONLY]


@pytest.mark.slow
@pytest.mark.parametrize("way", ALL)
def test_the_fullest_device_holds_what_is_planned(way):
    peaks = apart(way, Network(), "adam")
    assert peaks.measured == pytest.approx(peaks.planned, rel=0.15)
