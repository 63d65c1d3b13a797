"""The parts of a simulation: stations at work, the wires between them, and the caller that feeds them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipetrain.simulation.costs import Network, Route
from pipetrain.simulation.kernel import Happens

NOTHING = -1
Arrivals = deque[float]
Due = list[tuple[float, int]]  # when a station has what it waits for, and which


class StationWork(NamedTuple):
    """What a station has to do: an action for each entry of ``order``, by codes.

    A code is ``microbatch * len(kinds) + kind``, where ``kinds`` are the operations of the station's stages, such as
    (F of stage 2, B of stage 2). ``compute_s`` are each kind's seconds for every microbatch of a minibatch in turn,
    ``inputs`` where each kind waits for what is sent (``NOTHING``: nowhere). ``updates`` and ``reports`` say of every
    entry of the order whether the stage's update follows it, and whether it ends the last stage's forwards of a
    minibatch.
    """

    kinds: list[tuple[int, str]]
    order: array[int]
    compute_s: list[float]
    inputs: list[int]
    updates: bytes
    reports: bytes


class Station:
    """One replica of a device's stages: what it has to do, and where it stands.

    ``update_s`` are the seconds of each kind's update, ``factors`` by how much longer each action takes, if it differs.
    """

    __slots__ = (
        "awaits", "begins", "compute_s", "device", "ends", "factors", "free_s", "inputs", "kinds", "length", "number",
        "order", "outputs", "period", "place", "position", "reduction", "reports", "seconds", "slots", "start_s",
        "update_s", "updates", "work",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        place: tuple[int, int],
        device: int,
        work: StationWork,
        update_s: list[float],
        factors: array[float] | None = None,
    ) -> None:
        self.number, self.place, self.device, self.work = number, place, device, work
        self.order, self.compute_s, self.updates, self.reports = work.order, work.compute_s, work.updates, work.reports
        self.kinds, self.period = len(work.kinds), len(work.compute_s)
        self.update_s, self.factors = update_s, factors
        slots = 1 + max(work.inputs)
        self.inputs: list[list[Arrivals]] = [[] for _ in range(slots + 1)]  # the last one is NOTHING's: always empty
        self.outputs: list[list[Wire]] = [[] for _ in work.kinds]
        self.reduction: SimulatedReduction | None = None
        self.position, self.start_s, self.free_s, self.awaits = 0, 0.0, 0.0, NOTHING

    def prepare(self, begins: Happens, ends: Happens) -> None:
        """Get ready to be simulated action by action: what happens when one could begin, and at its end."""
        codes = np.frombuffer(self.order, dtype=np.int32)
        seconds = np.array(self.compute_s)[codes % self.period]
        if self.factors is not None:
            seconds *= np.frombuffer(self.factors)
        self.begins, self.ends, self.length = begins, ends, len(codes)
        self.seconds: list[float] = seconds.tolist()  # of each action
        self.slots: list[int] = np.array(self.work.inputs)[codes % self.kinds].tolist()  # where each waits

    def where(self, position: int) -> str:
        """For people: which device it is, and which action it has at this position of its order."""
        microbatch, kind = divmod(self.order[position], self.kinds)
        stage, op = self.work.kinds[kind]
        return f"device {self.place[0]} stands before {stage}{op}{microbatch}, its action {position}"


class Wire:
    """What one station sends another of one value of a stage, which waits in its ``slot``: first in, first out."""

    __slots__ = (
        "_free_at", "_media", "_microbatches", "arrivals", "holds_s", "latency_s", "number", "reader", "sizes",
        "slot", "towards",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        network: Network,
        route: Route,
        sizes: Sequence[int | None],
        reader: Station,
        slot: int,
        towards: int,
    ) -> None:
        """``sizes`` are the bytes of each microbatch of a minibatch, None where the stations share none of its rows.

        ``towards`` is 1 where it leads to the next stage, -1 to the one before.
        """
        self.number, self.reader, self.slot, self.towards = number, reader, slot, towards
        self.arrivals: Arrivals = deque()
        self.sizes, self._microbatches = sizes, len(sizes)
        self.holds_s = [NOTHING if size is None else size / route.bandwidth_bytes_per_s for size in sizes]
        self.latency_s, self._media, self._free_at = route.latency_s, route.media, network.free_at
        reader.inputs[slot].append(self.arrivals)

    def send(self, now: float, microbatch: int) -> float:
        """Begin a transfer as soon as its media are free: ``Network.send``, written out, as it is called so often."""
        hold_s = self.holds_s[microbatch % self._microbatches]
        if hold_s != NOTHING:
            free_at = self._free_at
            for medium in self._media:
                if free_at[medium] > now:
                    now = free_at[medium]
            now += hold_s
            for medium in self._media:
                free_at[medium] = now
            now += self.latency_s
        self.arrivals.append(now)
        return now


class SimulatedReduction(Protocol):
    """How the replicas of a stage sum their gradients.

    Both methods take the time, and give the stations that then know when they have what they wait for. ``sent_bytes``
    are those that each replica sends for a minibatch.
    """

    sent_bytes: list[int]

    def enter(self, station: int, now: float) -> Due:
        """The station has its gradients."""

    def updated(self, station: int, now: float) -> Due:
        """The station has updated its weights."""


class SimulatedCaller:
    """Posts minibatches, so many ahead of the results it has taken, each ``caller_s`` after a result.

    A result is there after so many ``reports`` of its minibatch. Everything posted arrives at once at all ``inputs``,
    those of the first stage's stations.
    """

    def __init__(self, minibatches: int, microbatches: int, window: int, caller_s: float, reports: int) -> None:
        self.inputs: list[Any] = []  # which times are appended to
        self._microbatches, self._caller_s, self._window, self._minibatches = (
            microbatches,
            caller_s,
            window,
            minibatches,
        )
        self._missing = [reports] * minibatches
        self._latest_s = [0.0] * minibatches
        self._taken, self._posted, self._now = 0, 0, 0.0

    def begin(self) -> None:
        """Post the first minibatches."""
        for _ in range(min(self._window, self._minibatches)):
            self._post()

    def report(self, minibatch: int, now: float) -> bool:
        """Take a report; whether anything new is posted."""
        self._missing[minibatch] -= 1
        if now > self._latest_s[minibatch]:
            self._latest_s[minibatch] = now
        before = self._posted
        while self._taken < self._minibatches and not self._missing[self._taken]:
            self._now = max(self._now, self._latest_s[self._taken]) + self._caller_s
            self._taken += 1
            if self._posted < self._minibatches:
                self._post()
        return self._posted > before

    def _post(self) -> None:
        for arrivals in self.inputs:
            arrivals.extend([self._now] * self._microbatches)
        self._posted += 1
