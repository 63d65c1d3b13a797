"""Times of a program's function as spans and transfers."""

from __future__ import annotations

import numpy as np

from pipetrain.compute.program.clock import Clock, Crossing, ProgramTimes, Timed
from pipetrain.schemes.actions import Action


def test_what_is_taken_has_come_before_it_is_used():
    """A sender may look at the clock a moment after its value is there."""
    clock = Clock("/device:CPU:0")
    sent, took = Action("F", 0, 0), Action("F", 1, 0)
    clock.actions = [Timed(sent, "a", 0, 0, 0, 1), Timed(took, "b", 0, 0, 2, 3)]
    clock.crossings = [Crossing("F", 0, (0, 0, 1, 0), 1, 1, 8)]
    times, at_s = ProgramTimes(clock, 1, (1, 1)), np.array([1.0, 2.0, 1.99, 3.0])
    spans = times.spans(0, at_s)
    assert [*spans.start_s] == [1.0, 2.0] and [*spans.end_s] == [2.0, 3.0]
    (transfer,) = times.transfers(0, {0: 4}, at_s)
    assert transfer.end_s == 2.0
    assert times.busy_s(at_s) == 2.0
