"""The memory that the plan names for every way to train, against that of a real run on four devices."""

from __future__ import annotations

import pytest

from benchmarks.memory_of_ways import MOMENTUM_ONLY, WAYS, Network, apart

ALL = [way for way in WAYS if way not in MOMENTUM_ONLY]
# Adam's step waits for all gradients of a device: what is there of them at once, when fewer processors work than there
# are devices, is not planned well enough in these ways.
OUT = pytest.mark.xfail(reason="not within 15% with Adam", strict=False)
KNOWN = ("2bw", "parameter-server", "grid 4x1", "coded-reduce 2, 2")


@pytest.mark.wide
@pytest.mark.parametrize("way", [pytest.param(way, marks=OUT) if way in KNOWN else way for way in ALL])
def test_all_devices_together_hold_what_is_planned(way):
    peaks = apart(way, Network(), "adam")
    assert peaks.measured == pytest.approx(peaks.planned, rel=0.15)
