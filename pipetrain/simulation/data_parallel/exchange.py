"""What devices exchange of packs in simulated time: gradients to be summed, and weights that a server returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from pipetrain.schemes.transfers.plan import Pack, Phase
from pipetrain.simulation.data_parallel.messages import Flow, SimulatedMessage


class Returning:
    """Sends the packs of weights that a server returns, each when all of its variables have been updated.

    Args:
        phase: these packs.
        pushes: the packs whose sums the server gets.
        at_once: whether each waits until all that the server gets has come.
        send: sends the pack at a place of the phase.
    """

    def __init__(self, phase: Phase, pushes: Phase, at_once: bool, send: Callable[[int, Pack], None]) -> None:
        self._send = send
        self._chunks = Counter(n for pack in pushes.packs for n in pack.variables)  # that are not updated yet
        self._packs = [
            (place, pack, {*self._chunks} if at_once else {*pack.variables}) for place, pack in enumerate(phase.packs)
        ]

    def updated(self, pack: Pack) -> None:
        """The variables of a pack of gradients, or a chunk of one, are updated."""
        self._chunks -= Counter(pack.variables)
        for place, weights, missing in self._packs:
            if missing:
                missing -= {n for n in pack.variables if not self._chunks[n]}
                if not missing:
                    self._send(place, weights)


class Summing:
    """The sums of a phase's gradients: on the server whose phase it is, or on every worker.

    Among more than two workers each adds a part of the pack and sends the sum to all others.

    Args:
        count: of the workers.
        phase: the packs.
        step: which step it is.
        before: packs of other phases that the step has sent.
        flow: makes one of a phase and the number of each pack's messages.
        summed: is told the pack, the device and the messages that brought them whenever sums are there.
        sinks: the devices that need the sums.
    """

    def __init__(
        self,
        count: int,
        phase: Phase,
        step: int,
        before: int,
        flow: Callable[[Phase, int], Flow],
        summed: Callable[[Pack, int, list[SimulatedMessage]], None],
        sinks: range,
    ) -> None:
        self._workers, self._step, self._before, self._summed = range(count), step, before, summed
        self._sinks, self._scatters = sinks, len(sinks) > 2
        self._parts = len(sinks) if self._scatters else 1
        self._flow = flow(phase, (1 + self._scatters) * len(sinks) * (count - 1))
        self._missing: dict[tuple[int, int], int] = {}
        self._came: dict[tuple[int, int], list[SimulatedMessage]] = {}
        self._parts_missing: dict[tuple[int, int], int] = {}

    def offer(self, place: int, pack: Pack, worker: int) -> None:
        """A worker has its gradients of the pack at this place of the phase."""
        size = pack.size_bytes / self._parts
        for sink in beginning_with(worker, self._sinks):
            if sink == worker:
                self._added(place, pack, sink, None)
                continue
            message = SimulatedMessage("R", self._step, self._before + place, worker, sink, size)
            self._flow.offer(place, message, partial(self._added, place, pack, sink, message))

    def _added(self, place: int, pack: Pack, sink: int, message: SimulatedMessage | None) -> None:
        key = place, sink
        self._missing[key] = self._missing.get(key, len(self._workers)) - 1
        self._came.setdefault(key, []).extend([message] if message else [])
        if self._missing[key]:
            return
        if not self._scatters:
            self._summed(pack, sink, self._came.pop(key))
            return
        self._came.pop(key)
        size = pack.size_bytes / self._parts
        for worker in beginning_with(sink, self._workers):
            if worker == sink:
                self._gathered(place, pack, worker, None)
                continue
            message = SimulatedMessage("R", self._step, self._before + place, sink, worker, size)
            arrives = partial(self._gathered, place, pack, worker, message)
            self._flow.offer(place, message, arrives, waits=False)

    def _gathered(self, place: int, pack: Pack, worker: int, message: SimulatedMessage | None) -> None:
        key = place, worker
        self._parts_missing[key] = self._parts_missing.get(key, len(self._workers)) - 1
        came = self._came.setdefault((place, len(self._workers) + worker), [])
        came += [message] if message else []
        if not self._parts_missing[key]:
            self._summed(pack, worker, came)


def beginning_with(device: int, others: range) -> list[int]:
    """The others, beginning with this device's place: so that not all send to the same one first."""
    first = device % len(others)
    return [*others[first:], *others[:first]]
