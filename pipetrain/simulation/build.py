"""The stations of a simulated partition, how they are joined, and how replicas sum their gradients."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, count

import numpy as np

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.stages import StagePlan
from pipetrain.schemes.actions import OPERATIONS, SENT, Action, completes
from pipetrain.schemes.schedules import groups_of
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.splitting import microbatch_rows, reduction_bytes, rows_of
from pipetrain.simulation.costs import Adding, Network, Route, StageCosts, additions
from pipetrain.simulation.stations import NOTHING, Due, Station, StationWork, Wire

REDUCTIONS = ("ring", "server")


class Ring:
    """All replicas wait for the last, then sum the gradients in a ring; each updates its own weights.

    Of the gradients only their bytes together are known: every replica is taken to sum an r-th of them. In training it
    sums whole variables, see ``splitting.shared_out``.

    Args:
        network: the links.
        stations: the numbers of the stage's replicas.
        devices: theirs.
        size_bytes: the gradients'.
    """

    def __init__(self, network: Network, stations: Sequence[int], devices: Sequence[int], size_bytes: int) -> None:
        self._network, self._stations, self._devices = network, stations, devices
        self._size_bytes, self._entered = size_bytes, 0
        replicas = len(devices)
        self.sent_bytes = [reduction_bytes(size_bytes, Fraction(size_bytes) / replicas, replicas)] * replicas

    def enter(self, station: int, now: float) -> Due:
        """The last one's coming sets the ring going."""
        self._entered += 1
        if self._entered < len(self._stations):
            return []
        self._entered = 0
        end_s = self._network.reduce(self._devices, self._size_bytes, now)
        return [(end_s, each) for each in self._stations]

    def updated(self, station: int, now: float) -> Due:
        """Nobody waits for it."""
        return []


class Server:
    """Each replica sends its gradients to the first one's device, which updates the weights and sends them back.

    Whatever the links, the server has one port, which takes in one transfer at a time and sends out one.
    """

    def __init__(self, network: Network, stations: Sequence[int], devices: Sequence[int], size_bytes: int) -> None:
        self._network, self._stations, self._size_bytes = network, stations, size_bytes
        self._entered, self._latest_s = 0, 0.0
        ways_in, ways_out = network.medium("server", "in", devices[0]), network.medium("server", "out", devices[0])
        self._in = {n: _through(network.route(d, devices[0]), ways_in) for n, d in _others(stations, devices)}
        self._out = {n: _through(network.route(devices[0], d), ways_out) for n, d in _others(stations, devices)}
        self.sent_bytes = [(len(devices) - 1) * size_bytes, *[size_bytes] * (len(devices) - 1)]

    def enter(self, station: int, now: float) -> Due:
        """The gradients go to the server; it has them when the last are there."""
        if station in self._in:
            now = self._network.send(self._in[station], self._size_bytes, now)
        self._entered, self._latest_s = self._entered + 1, max(self._latest_s, now)
        if self._entered < len(self._stations):
            return []
        self._entered = 0
        return [(self._latest_s, self._stations[0])]

    def updated(self, station: int, now: float) -> Due:
        """The server's weights go to the others."""
        if station in self._out:
            return []
        return [(self._network.send(route, self._size_bytes, now), n) for n, route in self._out.items()]


class MessageExchange:
    """Each replica sends its gradients as a message to every other when it has them, and updates its own weights.

    Args:
        network: the links.
        stations: the numbers of the stage's replicas.
        devices: theirs.
        size_bytes: of a message.
    """

    def __init__(self, network: Network, stations: Sequence[int], devices: Sequence[int], size_bytes: int) -> None:
        self._network, self._size_bytes, replicas = network, size_bytes, len(devices)
        self._stations, self._entered, self._there_s = stations, 0, dict.fromkeys(stations, 0.0)
        self._routes = {
            n: [(m, network.route(device, other)) for m, other in zip(stations, devices, strict=True) if m != n]
            for n, device in zip(stations, devices, strict=True)
        }
        self.sent_bytes = [(replicas - 1) * size_bytes] * replicas

    def enter(self, station: int, now: float) -> Due:
        """Its messages leave; when those of all are on their way, it is known when each has all of them."""
        self._entered += 1
        self._there_s[station] = max(self._there_s[station], now)
        for other, route in self._routes[station]:
            self._there_s[other] = max(self._there_s[other], self._network.send(route, self._size_bytes, now))
        if self._entered < len(self._stations):
            return []
        self._entered, due = 0, [(there_s, n) for n, there_s in self._there_s.items()]
        self._there_s = dict.fromkeys(self._stations, 0.0)
        return due

    def updated(self, station: int, now: float) -> Due:
        """Nobody waits for it."""
        return []


def _others(stations: Sequence[int], devices: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(stations, devices, strict=True))[1:]


def _through(route: Route, medium: int) -> Route:
    return route._replace(media=(*route.media, medium))


@dataclass(frozen=True)
class SimulationOptions:
    """How to simulate, see ``simulate``."""

    minibatches: int
    microbatches: int
    window: int
    caller_s: float
    overhead_s: float
    speeds: Sequence[float]
    slowdown: float
    seed: int
    reduction: str


class StationBuilder:
    """A station for each replica of each device's stages, the wires between them, and how replicas sum gradients.

    Args:
        stages: what they cost.
        devices: of each device of the schedule, those of its replicas.
        batch_size: rows of a minibatch.
        scheme: the order of actions.
        options: see ``simulate``.
        cluster: how the devices are joined.

    Raises ScheduleError for an order that cannot run.
    """

    def __init__(
        self,
        stages: Sequence[StagePlan],
        devices: Sequence[Sequence[int]],
        batch_size: int,
        scheme: Scheme,
        options: SimulationOptions,
        cluster: Cluster,
    ) -> None:
        self._stages, self._devices, self._batch_size = stages, devices, batch_size
        self._scheme, self._options, self._network = scheme, options, Network(cluster)
        self._costs = StageCosts(stages, batch_size, scheme, options.microbatches, options.overhead_s)
        self._shares = [
            [[piece[r.start : r.stop] for r in _split(len(piece), len(each))] for piece in self._microbatch_rows()]
            for each in devices
        ]
        self._numbers = [range(end - len(each), end) for each, end in zip(devices, _ends(devices), strict=True)]
        self.stations = [station for device in range(len(devices)) for station in self._made(device)]
        self._join()
        self._replicate()

    @property
    def reports(self) -> int:
        """How many reports a minibatch's result waits for."""
        if self._scheme.asynchronous:
            return len(self._devices[self._place(len(self._stages) - 1)])
        return sum(len({stage for stage, _ in station.work.kinds}) for station in self.stations)

    @property
    def plain(self) -> bool:
        """Whether every station has one stage, of F and B, and takes microbatches in their order."""
        if any([op for _, op in station.work.kinds] != ["F", "B"] for station in self.stations):
            return False
        codes = [np.frombuffer(station.order, dtype=np.int32) for station in self.stations]
        return all((np.diff(each[each % 2 == kind]) > 0).all() for each in codes for kind in (0, 1))

    def _microbatch_rows(self) -> list[range]:
        return microbatch_rows(self._batch_size, self._options.microbatches)

    def _place(self, stage: int) -> int:
        return self._scheme.schedule.place(stage, len(self._devices))

    def _made(self, device: int) -> Iterator[Station]:
        """The stations of a device's replicas."""
        options, microbatches = self._options, self._options.microbatches
        groups = groups_of(options.minibatches, microbatches)
        actions = list(self._scheme.schedule.order(device, len(self._devices), groups))
        kinds = _kinds(actions)
        order, added = _coded(actions, kinds), additions(actions, microbatches)
        updates, reports = _ends_of_minibatches(actions, len(self._stages), microbatches)
        slots = {stage: 2 * n for n, stage in enumerate(dict(kinds))}
        inputs = [_slot(slots[stage], op) for stage, op in kinds]
        for replica, (number, on) in enumerate(zip(self._numbers[device], self._devices[device], strict=True)):
            speed = options.speeds[on]
            compute_s = [
                self._costs.compute_s(stage, op, len(share[replica]), added.get((op, stage, n), Adding()), speed)
                for n, share in enumerate(self._shares[device])
                for stage, op in kinds
            ]
            served = replica > 0 and options.reduction == "server"
            update_s = [0.0 if served else self._costs.update_s(stage) / speed for stage, _ in kinds]
            work = StationWork(kinds, order, compute_s, inputs, updates, reports)
            yield Station(number, (device, replica), on, work, update_s, _factors(options, number, len(order)))

    def _join(self) -> None:
        """Wires between every replica of a stage and all those of the next one."""
        numbers = count()
        for stage in range(len(self._stages) - 1):
            upper, lower = self._place(stage), self._place(stage + 1)
            for r, n in enumerate(self._numbers[upper]):
                for q, m in enumerate(self._numbers[lower]):
                    sizes = self._sizes(stage, r, q)
                    for sender, value, reader, to in (
                        (self.stations[n], "outputs", self.stations[m], stage + 1),
                        (self.stations[m], "input gradients", self.stations[n], stage),
                    ):
                        self._wire(next(numbers), sender, value, reader, to, sizes)

    def _wire(
        self, number: int, sender: Station, value: str, reader: Station, stage: int, sizes: list[int | None]
    ) -> None:
        """A wire for what is sent to this stage of the reader."""
        towards = SENT[value]  # type: ignore[index]
        slot = next(
            at
            for at, (mine, op) in zip(reader.work.inputs, reader.work.kinds, strict=True)
            if mine == stage and at != NOTHING and (value, -towards) in OPERATIONS[op].needs
        )
        route = self._network.route(sender.device, reader.device)
        wire = Wire(number, self._network, route, sizes, reader, slot, towards)
        for kind, (mine, op) in enumerate(sender.work.kinds):
            if mine == stage - towards and value in OPERATIONS[op].makes:
                sender.outputs[kind].append(wire)

    def _sizes(self, stage: int, r: int, q: int) -> list[int | None]:
        """Bytes of each microbatch between replica r of a stage and q of the next: those of the rows they share."""
        sizes: list[int | None] = []
        crossing_bytes = self._stages[stage].crossing_bytes(self._scheme.compression)
        shares = self._shares[self._place(stage)], self._shares[self._place(stage + 1)]
        for upper, lower in zip(*shares, strict=True):
            rows = min(upper[r].stop, lower[q].stop) - max(upper[r].start, lower[q].start)
            sizes.append(round(crossing_bytes * rows / self._batch_size) if rows > 0 else None)
        return sizes

    def _replicate(self) -> None:
        """Where a stage has several replicas, they sum gradients."""
        compression, is_ring = self._scheme.replica_compression, self._options.reduction == "ring"
        if compression is not None and not is_ring:
            raise ValueError(
                "Replicas send compressed gradients to each other. Received: reduction='server', "
                f"replica_compression={str(compression)!r}. Try reduction='ring', or no compression."
            )
        kind = MessageExchange if compression is not None else Ring if is_ring else Server
        for stage, plan in enumerate(self._stages):
            devices, numbers = self._devices[self._place(stage)], self._numbers[self._place(stage)]
            if len(devices) > 1:
                size_bytes = plan.weight_bytes if compression is None else round(plan.exchanged_bytes(compression))
                reduction = kind(self._network, numbers, devices, size_bytes)
                for n in numbers:
                    self.stations[n].reduction = reduction


def _kinds(actions: Sequence[Action]) -> list[tuple[int, str]]:
    """Every operation of every stage that an order has, the stages in order, operations as in their table."""
    return sorted({(each.stage, each.op) for each in actions}, key=lambda kind: (kind[0], [*OPERATIONS].index(kind[1])))


def _coded(actions: Sequence[Action], kinds: Sequence[tuple[int, str]]) -> array[int]:
    number = {kind: n for n, kind in enumerate(kinds)}
    return array("i", (each.microbatch * len(kinds) + number[each.stage, each.op] for each in actions))


def _slot(first: int, op: str) -> int:
    """Where an operation of a stage waits: at the stage's first place for outputs, at its second one for gradients."""
    values = OPERATIONS[op].received
    return first + (values[0] == "input gradients") if values else NOTHING


def _ends_of_minibatches(actions: Sequence[Action], stages: int, microbatches: int) -> tuple[bytes, bytes]:
    """For each action, whether it completes the weight gradients of a minibatch, or the last stage's forwards."""
    reports = bytearray(len(actions))
    forwards: dict[int, int] = {}
    for n, action in enumerate(actions):
        if action.stage == stages - 1 and "outputs" in action.operation.makes:
            forwards[action.microbatch // microbatches] = n
    for n in forwards.values():
        reports[n] = 1
    return bytes(completes(actions, microbatches)), bytes(reports)


def _ends(devices: Sequence[Sequence[int]]) -> list[int]:
    return list(accumulate(len(each) for each in devices))


def _split(rows: int, replicas: int) -> list[range]:
    return [rows_of(rows, replica, replicas) for replica in range(replicas)]


def _factors(options: SimulationOptions, number: int, length: int) -> array[float] | None:
    if not options.slowdown:
        return None
    sigma = math.sqrt(math.log1p(options.slowdown**2))
    rng = np.random.default_rng([options.seed, number])
    return array("d", rng.lognormal(-(sigma**2) / 2, sigma, length).tobytes())
