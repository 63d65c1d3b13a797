"""What happened in a simulation: events in the order of time, and the record of them by station and wire."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


class Journal:
    """What happened in the order of time: the ``numbers`` of what it happened to, and so many seconds of each event.

    One array for all, and not one for each, is what the processor's caches are made for.
    """

    def __init__(self, width: int = 1) -> None:
        self.numbers = array("i")
        self.seconds = [array("d") for _ in range(width)]

    def note(self, number: int, now: float) -> None:
        """Write down one event."""
        self.numbers.append(number)
        self.seconds[0].append(now)

    def of_each(self, count: int) -> list[list[Seconds]]:
        """For each column of seconds: those of each of so many numbers, in the order of time."""
        numbers = np.frombuffer(self.numbers, dtype=np.int32)
        small = numbers.astype(np.uint16) if count <= 1 << 16 else numbers  # which are sorted by radix
        order = np.argsort(small, kind="stable")
        ends = np.cumsum(np.bincount(numbers, minlength=count))[:-1]
        return [np.split(np.frombuffer(each)[order], ends) for each in self.seconds]


class SimulationRecord(NamedTuple):
    """What happened, in the order of time, by the numbers of stations and wires.

    When each action started and had computed; when the gradients of each minibatch were reduced, where they were, and
    the weights updated; when each message arrived.
    """

    start_s: list[Seconds]
    computed_s: list[Seconds]
    updated_s: list[Seconds]
    reduced_s: list[Seconds]
    arrived_s: list[Seconds]
