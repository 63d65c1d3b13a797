"""What the stations of a simulation did, as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipetrain.simulation.journal import SimulationRecord
from pipetrain.simulation.stations import SimulatedReduction, Station, Wire
from pipetrain.trace.records import Names, Spans, Transfers
from pipetrain.trace.trace import Trace


def trace_of(stations: Sequence[Station], record: SimulationRecord, ranks: int | None) -> Trace:
    """The spans of all actions and the transfers over all wires and among replicas.

    ``ranks`` is the number of devices where these have several stages each, otherwise None.
    """
    names = tuple(f"device:{n}" for n in range(1 + max(station.device for station in stations)))
    spans = [_spans(station, names, record) for station in stations]
    sent = [_transfers(station, kinds, wire, record) for station in stations for wire, kinds in _wires(station).items()]
    sent += [_reduced(each, each.reduction, record) for each in stations if each.reduction]
    return Trace.of(Spans.joined(spans), Transfers.joined(sent), ranks)


def _spans(station: Station, devices: tuple[str, ...], record: SimulationRecord) -> Spans:
    """The station's actions."""
    codes, updates = _codes_and_updates(station)
    stage, op = (np.array(each)[codes % station.kinds] for each in zip(*station.work.kinds, strict=True))
    end_s = record.computed_s[station.number].copy()
    end_s[updates] = record.updated_s[station.number]
    version = np.zeros(len(codes), dtype=np.int32)
    for mine in (stage == each for each in dict(station.work.kinds)):
        version[mine] = np.cumsum(updates[mine]) - updates[mine]
    return Spans(
        op=op,
        stage=stage.astype(np.int32),
        microbatch=codes // station.kinds,
        device=Names(_everywhere(station.device, codes), devices),
        start_s=record.start_s[station.number],
        end_s=end_s,
        version=version,
        replica=_everywhere(station.place[1], codes),
    )


def _wires(station: Station) -> dict[Wire, list[int]]:
    """The station's wires, and the kinds of its actions that send over each."""
    found: dict[Wire, list[int]] = {}
    for kind, wires in enumerate(station.outputs):
        for wire in wires:
            found.setdefault(wire, []).append(kind)
    return found


def _transfers(sender: Station, kinds: list[int], wire: Wire, record: SimulationRecord) -> Transfers:
    """What went over a wire, without messages that carry no rows."""
    codes = np.frombuffer(sender.order, dtype=np.int32)
    (stage, _), sizes = sender.work.kinds[kinds[0]], wire.sizes
    mine = np.isin(codes % sender.kinds, kinds)
    microbatch = codes[mine] // sender.kinds
    piece = microbatch % len(sizes)
    table = Transfers(
        op=np.full(len(microbatch), "F" if wire.towards > 0 else "B"),
        microbatch=microbatch,
        from_stage=_everywhere(stage, microbatch),
        from_replica=_everywhere(sender.place[1], microbatch),
        to_stage=_everywhere(stage + wire.towards, microbatch),
        to_replica=_everywhere(wire.reader.place[1], microbatch),
        size_bytes=np.array([size or 0 for size in sizes], dtype=np.int64)[piece],
        start_s=record.computed_s[sender.number][mine],
        end_s=record.arrived_s[wire.number],
        **_alone(microbatch),
    )
    carries = np.array([size is not None for size in sizes])
    return table if carries.all() else table[carries[piece]]


def _reduced(station: Station, reduction: SimulatedReduction, record: SimulationRecord) -> Transfers:
    """What a replica sent to sum gradients with the others."""
    codes, updates = _codes_and_updates(station)
    microbatch = codes[updates] // station.kinds
    (stage_number, _), number = station.work.kinds[0], station.place[1]
    stage, replica = _everywhere(stage_number, microbatch), _everywhere(number, microbatch)
    return Transfers(
        op=np.full(len(microbatch), "R"),
        microbatch=microbatch,
        from_stage=stage,
        from_replica=replica,
        to_stage=stage,
        to_replica=replica,
        size_bytes=np.full(len(microbatch), reduction.sent_bytes[number]),
        start_s=record.computed_s[station.number][updates],
        end_s=record.reduced_s[station.number],
        **_alone(microbatch),
    )


def _codes_and_updates(station: Station) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    return np.frombuffer(station.order, dtype=np.int32), np.frombuffer(station.work.updates, dtype=np.bool_)


def _alone(like: NDArray[np.int32]) -> dict[str, Any]:
    """Of transfers that no plan orders."""
    return {"pack": np.zeros_like(like), "kept_s": np.zeros(len(like))}


def _everywhere(number: int, like: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.full(len(like), number, dtype=np.int32)
