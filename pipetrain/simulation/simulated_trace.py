"""What happened in a simulation, as a trace: of the kernel's devices, and of a pipeline's stations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipetrain.simulation.kernel import DeviceWork, Kernel, SimulatedMessage, SimulationRecord
from pipetrain.simulation.stations import SimulatedReduction, Station, Wire
from pipetrain.trace.records import Names, Spans, Transfer, Transfers
from pipetrain.trace.trace import Trace


def trace_of_devices(kernel: Kernel, joined: bool = True, period: int = 1) -> Trace:
    """The spans of what devices did, and the messages; a device's number is that of the replica.

    ``joined``: what a device did of one operation of a step without a pause is one span, and what took no time none.
    ``period``: steps repeat after so many.
    """
    names = tuple(f"device:{n}" for n in range(len(kernel.devices)))
    columns = zip(*kernel.work, strict=True) if kernel.work else [()] * len(DeviceWork._fields)
    work = [np.array(column) for column in columns]
    device, op, step, start_s, end_s = _joined(work) if joined else work
    spans = Spans(
        op=op.astype(Spans.dtypes[0]),
        stage=np.zeros(len(device), dtype=np.int32),
        microbatch=step.astype(np.int32),
        device=Names(device.astype(np.int32), names),
        start_s=start_s.astype(float),
        end_s=end_s.astype(float),
        version=step.astype(np.int32),
        replica=device.astype(np.int32),
    )
    sent = Transfers.of(_transfer(each) for each in kernel.messages if each.what is not None)
    return Trace.of(spans, sent, period=period)


def _joined(work: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """The columns of work, of one device after another, joined where nothing is between."""
    order = np.argsort(work[0], kind="stable")
    order = order[(work[4] > work[3])[order]]
    device, op, step, start_s, end_s = (each[order] for each in work)
    goes_on = (device[1:] == device[:-1]) & (op[1:] == op[:-1]) & (step[1:] == step[:-1])
    breaks = ~(goes_on & (start_s[1:] == end_s[:-1]))
    begins, ends = (np.insert(breaks, at, True)[: len(device)] for at in (0, len(breaks)))
    return [*(each[begins] for each in (device, op, step, start_s)), end_s[ends]]


def _transfer(message: SimulatedMessage) -> Transfer:
    kept_s, size_bytes = max(0.0, message.used_s - message.arrived_s), round(message.size_bytes)
    assert message.what is not None
    ends = 0, message.source, 0, message.sink
    return Transfer(
        message.what, message.step, *ends, size_bytes, message.left_s, message.arrived_s, message.pack, kept_s
    )


def trace_of_stations(stations: Sequence[Station], record: SimulationRecord, ranks: int | None) -> Trace:
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
