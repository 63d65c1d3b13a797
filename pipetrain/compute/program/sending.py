"""What stages send each other while a program is traced: activations down, their gradients up, rows to each replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.cores import is_prompt
from pipetrain.compute.functions.stage_values import joined_rows
from pipetrain.compute.program.arguments import Arguments, Settings
from pipetrain.compute.program.clock import Clock, Crossing
from pipetrain.compute.program.stage_trace import ForwardMessage, StagePlace
from pipetrain.compute.transfers.compression import CutMessages
from pipetrain.schemes.splitting import RowsPiece, stream_of
from pipetrain.trace.records import What


class Sending:
    """Values of stages, by who has made them, and as they come to who takes them.

    Nothing but its value orders what is sent: it leaves as soon as it is there. Where it is compressed, what a replica
    has made is kept as messages, by the replicas that receive them.

    Args:
        devices: of the replicas of every stage.
        settings: of the function.
        arguments: of the function.
        clock: notes when things arrive, if that is wanted.
        cuts: make messages of what crosses each cut, None where that is sent as it is.
        number: that of the program's minibatch 0, for random numbers of messages.
    """

    def __init__(
        self,
        devices: Sequence[Sequence[str]],
        settings: Settings,
        arguments: Arguments,
        clock: Clock | None,
        cuts: Sequence[CutMessages] | None = None,
        number: Any = None,
    ) -> None:
        self._devices, self._settings, self._arguments, self._clock = devices, settings, arguments, clock
        self._cuts, self._number, self._numbers = cuts, number, dict[str, Any]()
        self._replicas = [len(each) for each in devices]
        self._made: dict[tuple[What, int, int, int], Any] = {}
        self._taken = set[tuple[What, int, int]]()
        self._ends: dict[tuple[What, int, int, int], int] = {}  # places of the times when these were made

    def make(self, op: What, place: StagePlace, microbatch: int, values: Any) -> None:
        """A replica of a stage has made what goes down (F) or up (B), None if it has no rows."""
        sink = _sink(op, place.stage)
        if self._cuts is not None and 0 <= sink < len(self._devices):
            if op == "F":
                values = values._replace(values=self._messages(place, sink, microbatch, values.values))
            else:
                values = self._messages(place, sink, microbatch, values)
        self._made[op, place.stage, place.replica, microbatch] = values

    def _messages(self, place: StagePlace, sink: int, microbatch: int, values: Any) -> Any:
        """What a replica sends, by the replicas that receive it; None if it has no rows."""
        if values is None:
            return None
        device, count = self._device(place), self._settings.microbatches
        made = {}
        for piece in self._pieces(microbatch, place.stage, sink):
            if piece.sender == place.replica:
                ends = self._replicas[place.stage], self._replicas[sink]
                stream = stream_of(microbatch % count, piece, ends)
                with tf.device(device):
                    part = self._part(values, place.stage, sink, piece, microbatch)
                    step = self.number_on(device) + microbatch // count
                    made[piece.receiver] = self._cut(place.stage, sink).encoded(part, step, stream)
        return made

    def _cut(self, source: int, sink: int) -> CutMessages:
        assert self._cuts is not None
        return self._cuts[min(source, sink)]

    def number_on(self, device: str) -> Any:
        """The number of the program's minibatch 0, on a device."""
        if device not in self._numbers:
            with tf.device(device), tf.control_dependencies(None):
                self._numbers[device] = tf.identity(self._number)
        return self._numbers[device]

    def _part(self, values: Any, source: int, sink: int, piece: RowsPiece, microbatch: int) -> Any:
        """The rows of a piece; in the scope of the sender's device."""
        if piece.is_whole:
            return values
        cut = self._arguments.cut
        return tf.nest.map_structure(lambda each: cut(each, source, sink, piece, microbatch), values)

    def made_at(self, op: What, place: StagePlace, microbatch: int, time: int) -> None:
        """The place of the time when it had made it."""
        self._ends[op, place.stage, place.replica, microbatch] = time

    def is_made(self, op: What, stage: int, microbatch: int) -> bool:
        """Whether all replicas of a stage have made it."""
        return all((op, stage, r, microbatch) in self._made for r in range(self._replicas[stage]))

    def from_above(self, place: StagePlace, microbatch: int) -> ForwardMessage:
        """What a replica gets of the stage before, on its device as soon as it can be there."""
        source, device = place.stage - 1, self._device(place)
        made = [self._made["F", source, r, microbatch] for r in range(self._replicas[source])]
        values = self._received("F", source, place, microbatch, lambda sent: sent.values)
        penalties = [_moved(each.penalty, device) for each in made if each.penalty is not None]
        with tf.device(device):
            penalty = (penalties[0] if len(made) == 1 else tf.add_n(penalties)) if penalties else None
        return ForwardMessage(values, penalty)

    def from_below(self, place: StagePlace, microbatch: int) -> list[tf.Tensor] | None:
        """The gradients that a replica gets of the stage after it."""
        gradients: list[tf.Tensor] | None = self._received("B", place.stage + 1, place, microbatch, lambda sent: sent)
        return gradients

    def _device(self, place: StagePlace) -> str:
        return self._devices[place.stage][place.replica]

    def _received(
        self, op: What, source: int, place: StagePlace, microbatch: int, values_of: Callable[[Any], Any]
    ) -> Any:
        found = []
        self._taken.add((op, source, microbatch))
        for piece in self._pieces(microbatch, source, place.stage):
            values = values_of(self._made[op, source, piece.sender, microbatch])
            if piece.receiver == place.replica and values is not None:
                found.append(self._sent(op, values, source, place, piece, microbatch))
        with tf.device(self._device(place)):
            return joined_rows(found) if found else None

    def _pieces(self, microbatch: int, source: int, sink: int) -> list[RowsPiece]:
        parts, number = self._settings.part(microbatch)
        return parts.pieces(number, self._replicas[source], self._replicas[sink])

    def _sent(self, op: What, values: Any, source: int, place: StagePlace, piece: RowsPiece, microbatch: int) -> Any:
        """One replica's piece, on the device of who takes it."""
        from_device, device = self._devices[source][piece.sender], self._device(place)
        if self._cuts is not None:
            values = values[piece.receiver]
        else:
            with tf.device(from_device):
                values = self._part(values, source, place.stage, piece, microbatch)
        there = _moved(values, device)
        self._note(op, values, there, (source, piece.sender, place.stage, piece.receiver), microbatch)
        if self._cuts is None:
            return there
        with tf.device(device), tf.control_dependencies(None):
            return self._cut(source, place.stage).decoded(there)

    def _note(self, op: What, values: Any, there: Any, ends: tuple[int, int, int, int], microbatch: int) -> None:
        """Note when a piece that was made in this function left and came."""
        source, sender, sink, receiver = ends
        from_device, device = self._devices[source][sender], self._devices[sink][receiver]
        begin = self._ends.get((op, source, sender, microbatch))
        if self._clock is None or begin is None:
            return
        end = begin
        if not (is_prompt(from_device) and is_prompt(device)):  # between processors of a process nothing is copied
            arrived = [each.op for each in tf.nest.flatten(there) if each is not None]
            end = self._clock.add(self._clock.now(arrived, device), device)
        self._clock.cross(Crossing(op, microbatch, ends, begin, end, 0), values, from_device, self._cuts is not None)

    def held(self) -> dict[tuple[What, int, int, int], Any]:
        """What was made and not yet taken; it is noted as sent."""
        ends = {("F", len(self._devices) - 1), ("B", 0)}
        left = {
            (op, stage, r, m): values
            for (op, stage, r, m), values in self._made.items()
            if (op, stage, m) not in self._taken and (op, stage) not in ends
        }
        for (op, stage, r, m), values in left.items():
            sink, sent = _sink(op, stage), values.values if op == "F" else values
            is_new = sent is not None and (op, stage, r, m) in self._ends
            for piece in self._pieces(m, stage, sink) if is_new else ():
                if piece.sender == r:
                    part = sent if self._cuts is None else sent[piece.receiver]
                    self._note(op, part, part, (stage, r, sink, piece.receiver), m)
        return left

    def resume(self, held: dict[tuple[What, int, int, int], Any]) -> None:
        """What an earlier function has left."""
        self._made.update(held)


def _sink(op: What, stage: int) -> int:
    """The stage to which a stage sends activations (F) or gradients (B)."""
    return stage + 1 if op == "F" else stage - 1


def _moved(values: Any, device: str) -> Any:
    """The values on another device, as soon as they can be there."""
    with tf.device(device), tf.control_dependencies(None):
        return tf.nest.map_structure(lambda each: each if _is_on(each, device) else tf.identity(each), values)


def _is_on(tensor: Any, device: str) -> bool:
    return tensor is None or tensor.device == device
