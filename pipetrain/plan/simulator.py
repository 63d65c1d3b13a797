"""What a run of a partition would be: a simulation over the schedules of real runs, which gives the same trace."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.columns import Names
from pipetrain.plan.events import Caller, Simulation, Station, Wire
from pipetrain.plan.network import Network
from pipetrain.plan.reduction import REDUCTIONS, Ring, Server
from pipetrain.plan.replay import ScheduleError
from pipetrain.plan.schemes import DATA_PARALLEL, SCHEMES, Scheme, check_name
from pipetrain.plan.stages import Partition, StagePlan
from pipetrain.plan.trace import Spans, Trace, Transfers

Shares = list[list[range]]  # of each stage, by piece and replica: the rows of a minibatch


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


def simulate(
    partition: Partition,
    scheme: str = "spectrain",
    cluster: Cluster | None = None,
    minibatches: int = 200,
    *,
    microbatches: int | None = None,
    overhead_s: float = 0.0,
    caller_s: float = 0.0,
    speeds: Sequence[float] | None = None,
    slowdown: float = 0.0,
    seed: int = 0,
    window: int | None = None,
    reduction: str = REDUCTIONS[0],
) -> Trace:
    """Simulate training: when every replica of every stage would do what, and what would be sent when.

    Stages walk the schedules that they walk in training. A replica takes its share of the rows of a stage's forward and
    backward seconds; after the last backward of a minibatch, replicas sum their gradients and update. A forward waits
    for the activations from all replicas above, a backward for the gradients from all below. Sending goes on beside
    computing, over links that carry one transfer at a time in each direction and what the cluster's levels say of
    ``contention``. ``single`` and ``data-parallel`` take the partition's stages together, on its first device and on
    all of them.

    Args:
        partition: the stages and what they cost; see ``partition``.
        scheme: the way to train.
        cluster: how devices are joined and how many work at once; by default as ``Cluster()``, with the partition's
            processors.
        minibatches: how many are trained before the pipeline drains.
        microbatches: pieces of a minibatch, for schemes that have any; by default as the partition was made for.
        overhead_s: seconds that every action takes beside its computing.
        caller_s: seconds that the caller takes between a minibatch's result and posting the next one.
        speeds: of the devices, 1 being that of the profile; by default all 1.
        slowdown: how much the seconds of actions vary: the standard deviation, as a part of the mean, of random factors
            (lognormal, with mean 1).
        seed: of these.
        window: how many minibatches are posted ahead of the results taken; by default as in training.
        reduction: how replicas, and the devices of ``data-parallel``, sum gradients: ``ring``, or ``server``, a
            parameter server on the first one's device.

    Raises:
        ValueError: what cannot be simulated, with what to try.
    """
    chosen = SCHEMES["single" if check_name(scheme) == DATA_PARALLEL else scheme]
    stages, devices = _placed(partition, scheme)
    options = Options(
        minibatches=_count("minibatches", minibatches),
        pieces=_pieces(chosen, len(stages), partition, microbatches),
        window=0 if window is None else _count("window", window),
        caller_s=_seconds("caller_s", caller_s),
        overhead_s=_seconds("overhead_s", overhead_s),
        speeds=_speeds(speeds, devices),
        slowdown=_seconds("slowdown", slowdown),
        seed=seed,
        reduction=_reduction(reduction),
    )
    if not options.window:
        ahead = math.ceil(len(stages) / options.pieces) + 2 if chosen.asynchronous else 1  # as run.Pipeline.window
        options = replace(options, window=ahead)
    cluster = cluster or Cluster(processors=partition.processors)
    return _Model(stages, devices, partition.batch_size, chosen, options).run(cluster)


class _Model:
    """Stages at their devices, and how they train."""

    def __init__(
        self,
        stages: Sequence[StagePlan],
        devices: Sequence[Sequence[int]],
        batch_size: int,
        scheme: Scheme,
        options: Options,
    ) -> None:
        self._stages, self._devices, self._batch_size = stages, devices, batch_size
        self._scheme, self._options = scheme, options
        self._shares = [_shares(batch_size, options.pieces, len(each)) for each in devices]
        first = np.cumsum([0, *(len(each) for each in devices)]).tolist()
        self._numbers = [range(a, b) for a, b in pairwise(first)]

    def run(self, cluster: Cluster) -> Trace:
        """Simulate on this cluster."""
        network, options, stations = Network(cluster), self._options, self._stations()
        self._join(network, stations)
        sent_bytes = self._replicate(network, stations)
        synchronous = not self._scheme.asynchronous
        reports = len(stations) if synchronous else len(self._devices[-1])
        caller = Caller(options.minibatches, options.pieces, options.window, options.caller_s, reports)
        Simulation(stations, caller, synchronous, cluster.processors).run()
        names = tuple(f"device:{n}" for n in range(1 + max(station.device for station in stations)))
        sent = [self._transfers(station, wire) for station in stations for wires in station.outputs for wire in wires]
        sent += [_reduced(stations[n], 2 * options.pieces, size) for n, size in sent_bytes.items()]
        spans = Spans.joined([_spans(station, 2 * options.pieces, names) for station in stations])
        return Trace.of(spans, Transfers.joined(sent))

    def _stations(self) -> list[Station]:
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
                served = r > 0 and options.reduction == "server"
                update_s = 0.0 if served else stage.update_s / speed
                factors = _factors(options, len(stations), len(order))
                stations.append(Station(len(stations), (k, r), device, order, compute_s, update_s, factors))
        return stations

    def _join(self, network: Network, stations: Sequence[Station]) -> None:
        """Wires between every replica and all those of the next stage."""
        for k in range(len(self._stages) - 1):
            for r, n in enumerate(self._numbers[k]):
                for q, m in enumerate(self._numbers[k + 1]):
                    sizes, upper, lower = self._sizes(k, r, q), stations[n], stations[m]
                    down, up = network.route(upper.device, lower.device), network.route(lower.device, upper.device)
                    upper.outputs[0].append(Wire(network, down, sizes, lower, 0))
                    lower.outputs[1].append(Wire(network, up, sizes, upper, 1))

    def _sizes(self, k: int, r: int, q: int) -> list[int | None]:
        """Bytes of each piece between replica r of stage k and q of the next one: those of the rows they share."""
        sizes: list[int | None] = []
        for upper, lower in zip(self._shares[k], self._shares[k + 1], strict=True):
            rows = min(upper[r].stop, lower[q].stop) - max(upper[r].start, lower[q].start)
            sizes.append(round(self._stages[k].output_bytes * rows / self._batch_size) if rows > 0 else None)
        return sizes

    def _replicate(self, network: Network, stations: Sequence[Station]) -> dict[int, int]:
        """Where a stage has several replicas, they sum gradients; gives the bytes that each of these sends."""
        sent_bytes: dict[int, int] = {}
        kind = Ring if self._options.reduction == "ring" else Server
        for stage, devices, numbers in zip(self._stages, self._devices, self._numbers, strict=True):
            if len(devices) > 1:
                reduction = kind(network, numbers, devices, stage.weight_bytes)
                sent_bytes |= dict(zip(numbers, reduction.sent_bytes, strict=True))
                for n in numbers:
                    stations[n].reduction = reduction
        return sent_bytes

    def _transfers(self, sender: Station, wire: Wire) -> Transfers:
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
            start_s=np.frombuffer(sender.computed_s)[mine],
            end_s=np.frombuffer(wire.arrivals),
        )
        carries = np.array([size is not None for size in sizes])
        return table if carries.all() else table[carries[piece]]


def _spans(station: Station, period: int, devices: tuple[str, ...]) -> Spans:
    codes = np.frombuffer(station.order, dtype=np.int32)
    updates = codes % period == period - 1
    end_s = np.frombuffer(station.computed_s).copy()
    end_s[updates] = np.frombuffer(station.updated_s)
    return Spans(
        op=np.array(["F", "B"])[codes % 2],
        stage=_everywhere(station.place[0], codes),
        minibatch=codes >> 1,
        device=Names(_everywhere(station.device, codes), devices),
        start_s=np.frombuffer(station.start_s),
        end_s=end_s,
        version=(np.cumsum(updates) - updates).astype(np.int32),
        replica=_everywhere(station.place[1], codes),
    )


def _reduced(station: Station, period: int, size_bytes: int) -> Transfers:
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
        start_s=np.frombuffer(station.computed_s)[updates],
        end_s=np.frombuffer(station.reduced_s),
    )


def _everywhere(number: int, like: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.full(len(like), number, dtype=np.int32)


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


def _shares(batch_size: int, pieces: int, replicas: int) -> Shares:
    """The rows of each piece and replica: as ``run.exchange.rows_of`` shares them out."""
    shares = []
    for piece in range(pieces):
        first, end = batch_size * piece // pieces, batch_size * (piece + 1) // pieces
        rows = end - first
        shares.append(
            [range(first + rows * r // replicas, first + rows * (r + 1) // replicas) for r in range(replicas)]
        )
    return shares


def _placed(partition: Partition, scheme: str) -> tuple[list[StagePlan], list[list[int]]]:
    """The stages to simulate and the devices of each."""
    stages = list(partition.stages)
    devices = [list(range(stage.device, stage.device + stage.replicas)) for stage in stages]
    every = [device for each in devices for device in each]
    if len({*every}) < len(every):
        raise ValueError(
            f"Each replica of a stage has a device of its own. Received: devices={devices}. "
            "Try pipetrain.partition, which places them."
        )
    if scheme not in ("single", DATA_PARALLEL):
        return stages, devices
    whole = replace(
        stages[0],
        last=stages[-1].last,
        output_bytes=0,
        **{name: sum(getattr(stage, name) for stage in stages) for name in _SUMMED},
    )
    return [whole], [every[:1] if scheme == "single" else every]


_SUMMED = ("blocks", "forward_s", "backward_s", "update_s", "weight_bytes")


def _pieces(scheme: Scheme, stages: int, partition: Partition, microbatches: int | None) -> int:
    if not scheme.splits:
        return 1
    least = scheme.least_microbatches(stages)
    pieces = max(partition.training.microbatches, least)
    if microbatches is not None:
        pieces = _count("microbatches", microbatches)
    if pieces < least or pieces > partition.batch_size:
        raise ValueError(
            "A minibatch has at least as many rows as microbatches, and 2bw as many of these as stages but one. "
            f"Received: microbatches={pieces}, batch_size={partition.batch_size}, {stages} stages. "
            f"Try microbatches={least}."
        )
    return pieces


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"A simulation counts from 1 up. Received: {name}={value!r}. Try {name}=4.")
    return value


def _seconds(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"A number from 0 up is needed. Received: {name}={value!r}. Try {name}=0.")
    return value


def _speeds(speeds: Sequence[float] | None, devices: Sequence[Sequence[int]]) -> Sequence[float] | None:
    last = max(device for each in devices for device in each)
    if speeds is not None and (len(speeds) <= last or not all(0 < speed < math.inf for speed in speeds)):
        raise ValueError(
            f"Every device has a speed above 0. Received: speeds={speeds!r} for devices up to {last}. "
            f"Try speeds={[1.0] * (last + 1)}."
        )
    return speeds


def _reduction(name: str) -> str:
    if name not in REDUCTIONS:
        raise ValueError(f"Unknown reduction. Received: reduction={name!r}. Try one of: {', '.join(REDUCTIONS)}.")
    return name
