"""The memory that the plan names for every way to train, against that of a real run on four devices."""

from __future__ import annotations

import pytest

from benchmarks.memory_of_ways import MOMENTUM_ONLY, WAYS, Network, apart

ALL = [way for way in WAYS if way not in MOMENTUM_ONLY]


# Adam's step waits for all gradients of a device: what is there of them at once, when fewer processors work than there
# are devices, is not planned well enough yet: 0.8 to 1.7 of the plan is measured.
@pytest.mark.xfail(reason="not within 15% in every way with Adam", strict=False)
@pytest.mark.wide
@pytest.mark.parametrize("way", ALL)
def test_all_devices_together_hold_what_is_planned(way):
    peaks = apart(way, Network(), "adam")
    assert peaks.measured == pytest.approx(peaks.planned, rel=0.15)
