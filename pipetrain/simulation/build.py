"""The stations of a simulated partition: what each has to do, how they are joined, and what they recorded."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count

import numpy as np
from numpy.typing import NDArray

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.stages import StagePlan
from pipetrain.schemes.table import Scheme
from pipetrain.schemes.validation import ScheduleError
from pipetrain.simulation.events import Record, Station, Wire
from pipetrain.simulation.network import Network
from pipetrain.simulation.reduction import Ring, Server
from pipetrain.trace.columns import Names
from pipetrain.trace.trace import Spans, Trace, Transfers

ADDING = 0.6  # of an update: adding gradients reads two and writes one where SGD with momentum reads three, writes two


@dataclass(frozen=True)
class Options:
    """How to simulate, see ``simulate``."""

    minibatches: int
    pieces: int
    window: int
    caller_s: float
    overhead_s: float
    speeds: Sequence[float] | None
    slowdown: float
    seed: int
    reduction: str


class StationBuilder:
    """A station for each replica of each stage, the wires between them, and how replicas sum gradients.

    Args:
        stages: what they cost.
        devices: of each stage, those of its replicas.
        batch_size: rows of a minibatch.
        scheme: the order of actions.
        options: see ``simulate``.
        cluster: how the devices are joined.
    """

    def __init__(
        self,
        stages: Sequence[StagePlan],
        devices: Sequence[Sequence[int]],
        batch_size: int,
        scheme: Scheme,
        options: Options,
        cluster: Cluster,
    ) -> None:
        self._stages, self._devices, self._batch_size = stages, devices, batch_size
        self._scheme, self._options, self._network = scheme, options, Network(cluster)
        self._shares = [_shares(batch_size, options.pieces, len(each)) for each in devices]
        self._numbers = [range(end - len(each), end) for each, end in zip(devices, _ends(devices), strict=True)]
        self.stations = self._made()
        self._join()
        self._sent_bytes = self._replicate()

    def trace(self, record: Record) -> Trace:
        """What the stations did."""
        names = tuple(f"device:{n}" for n in range(1 + max(station.device for station in self.stations)))
        period = 2 * self._options.pieces
        spans = [_spans(station, period, names, record) for station in self.stations]
        sent = [
            self._transfers(station, wire, record)
            for station in self.stations
            for wires in station.outputs
            for wire in wires
        ]
        sent += [_reduced(self.stations[n], period, size, record) for n, size in self._sent_bytes.items()]
        return Trace.of(Spans.joined(spans), Transfers.joined(sent))

    def _made(self) -> list[Station]:
        pieces, options = self._options.pieces, self._options
        groups = [range(i * pieces, (i + 1) * pieces) for i in range(options.minibatches)]
        stations: list[Station] = []
        for k, (stage, devices) in enumerate(zip(self._stages, self._devices, strict=True)):
            order = _order(self._scheme, k, len(self._stages), groups)
            for r, device in enumerate(devices):
                speed = options.speeds[device] if options.speeds else 1.0
                rows = [len(self._shares[k][piece][r]) for piece in range(pieces)]
                seconds = [(stage.forward_s, stage.backward_s)[code % 2] for code in range(2 * pieces)]
                compute_s = [
                    options.overhead_s + seconds[code] * rows[code // 2] / self._batch_size / speed
                    for code in range(2 * pieces)
                ]
                for code in range(3, 2 * pieces, 2):  # the backwards after the first
                    compute_s[code] += ADDING * stage.update_s / speed
                served = r > 0 and options.reduction == "server"
                update_s = 0.0 if served else stage.update_s / speed
                factors = _factors(options, len(stations), len(order))
                stations.append(Station(len(stations), (k, r), device, order, compute_s, update_s, factors))
        return stations

    def _join(self) -> None:
        """Wires between every replica and all those of the next stage."""
        network, stations, numbers = self._network, self.stations, count()
        for k in range(len(self._stages) - 1):
            for r, n in enumerate(self._numbers[k]):
                for q, m in enumerate(self._numbers[k + 1]):
                    sizes, upper, lower = self._sizes(k, r, q), stations[n], stations[m]
                    down, up = network.route(upper.device, lower.device), network.route(lower.device, upper.device)
                    upper.outputs[0].append(Wire(next(numbers), network, down, sizes, lower, 0))
                    lower.outputs[1].append(Wire(next(numbers), network, up, sizes, upper, 1))

    def _sizes(self, k: int, r: int, q: int) -> list[int | None]:
        """Bytes of each piece between replica r of stage k and q of the next one: those of the rows they share."""
        sizes: list[int | None] = []
        for upper, lower in zip(self._shares[k], self._shares[k + 1], strict=True):
            rows = min(upper[r].stop, lower[q].stop) - max(upper[r].start, lower[q].start)
            sizes.append(round(self._stages[k].output_bytes * rows / self._batch_size) if rows > 0 else None)
        return sizes

    def _replicate(self) -> dict[int, int]:
        """Where a stage has several replicas, they sum gradients; gives the bytes that each of these sends."""
        sent_bytes: dict[int, int] = {}
        kind = Ring if self._options.reduction == "ring" else Server
        for stage, devices, numbers in zip(self._stages, self._devices, self._numbers, strict=True):
            if len(devices) > 1:
                reduction = kind(self._network, numbers, devices, stage.weight_bytes)
                sent_bytes |= dict(zip(numbers, reduction.sent_bytes, strict=True))
                for n in numbers:
                    self.stations[n].reduction = reduction
        return sent_bytes

    def _transfers(self, sender: Station, wire: Wire, record: Record) -> Transfers:
        """What went over a wire, without messages that carry no rows."""
        codes = np.frombuffer(sender.order, dtype=np.int32)
        upper, lower = (sender, wire.reader) if wire.kind == 0 else (wire.reader, sender)
        sizes = self._sizes(*upper.place, lower.place[1])
        mine = codes % 2 == wire.kind
        microbatch = codes[mine] >> 1
        piece = microbatch % len(sizes)
        table = Transfers(
            op=np.full(len(microbatch), "FB"[wire.kind]),
            minibatch=microbatch,
            from_stage=_everywhere(sender.place[0], microbatch),
            from_replica=_everywhere(sender.place[1], microbatch),
            to_stage=_everywhere(wire.reader.place[0], microbatch),
            to_replica=_everywhere(wire.reader.place[1], microbatch),
            size_bytes=np.array([size or 0 for size in sizes], dtype=np.int64)[piece],
            start_s=record.computed_s[sender.number][mine],
            end_s=record.arrived_s[wire.number],
        )
        carries = np.array([size is not None for size in sizes])
        return table if carries.all() else table[carries[piece]]


def _spans(station: Station, period: int, devices: tuple[str, ...], record: Record) -> Spans:
    codes = np.frombuffer(station.order, dtype=np.int32)
    updates = codes % period == period - 1
    end_s = record.computed_s[station.number].copy()
    end_s[updates] = record.updated_s[station.number]
    return Spans(
        op=np.array(["F", "B"])[codes % 2],
        stage=_everywhere(station.place[0], codes),
        minibatch=codes >> 1,
        device=Names(_everywhere(station.device, codes), devices),
        start_s=record.start_s[station.number],
        end_s=end_s,
        version=(np.cumsum(updates) - updates).astype(np.int32),
        replica=_everywhere(station.place[1], codes),
    )


def _reduced(station: Station, period: int, size_bytes: int, record: Record) -> Transfers:
    codes = np.frombuffer(station.order, dtype=np.int32)
    updates = codes % period == period - 1
    minibatch = codes[updates] >> 1
    stage, replica = (_everywhere(number, minibatch) for number in station.place)
    return Transfers(
        op=np.full(len(minibatch), "R"),
        minibatch=minibatch,
        from_stage=stage,
        from_replica=replica,
        to_stage=stage,
        to_replica=replica,
        size_bytes=np.full(len(minibatch), size_bytes),
        start_s=record.computed_s[station.number][updates],
        end_s=record.reduced_s[station.number],
    )


def _everywhere(number: int, like: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.full(len(like), number, dtype=np.int32)


def _ends(devices: Sequence[Sequence[int]]) -> list[int]:
    return list(accumulate(len(each) for each in devices))


def _order(scheme: Scheme, stage: int, stages: int, groups: list[range]) -> array[int]:
    """The stage's order of actions as codes. Raises ScheduleError unless microbatches keep their order."""
    order = array("i", (2 * action[2] + (action[0] == "B") for action in scheme.schedule(stage, stages, groups)))
    codes = np.frombuffer(order, dtype=np.int32)
    if any((np.diff(codes[codes % 2 == kind]) <= 0).any() for kind in (0, 1)):
        raise ScheduleError("What a stage sends arrives in the order of its sending: microbatches cannot overtake.")
    return order


def _factors(options: Options, number: int, length: int) -> array[float] | None:
    if not options.slowdown:
        return None
    sigma = math.sqrt(math.log1p(options.slowdown**2))
    rng = np.random.default_rng([options.seed, number])
    return array("d", rng.lognormal(-(sigma**2) / 2, sigma, length).tobytes())


def _shares(batch_size: int, pieces: int, replicas: int) -> list[list[range]]:
    """The rows of each piece and replica: as ``run.exchange.rows_of`` shares them out."""

    def parts(rows: range, count: int) -> list[range]:
        return [rows[len(rows) * n // count : len(rows) * (n + 1) // count] for n in range(count)]

    return [parts(piece, replicas) for piece in parts(range(batch_size), pieces)]
