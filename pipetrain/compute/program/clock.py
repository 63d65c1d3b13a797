"""Times of day at which actions begin and end: noted on the devices, and read as spans and transfers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import is_processor, processor_of
from pipetrain.schemes.actions import Action
from pipetrain.schemes.splitting import Parts
from pipetrain.trace.records import Span, Spans, Transfer, Transfers, What

READINGS = 5  # of another process's clock


class Timed(NamedTuple):
    """An action of one replica of a stage, when this had such a version; its begin and end are at places of the times.

    Minibatches and versions are counted from the program's minibatch 0.
    """

    action: Action
    device: str
    replica: int
    version: int
    begin: int
    end: int


class Crossing(NamedTuple):
    """What one replica of a stage sent another of a microbatch, from one of the times to another.

    ``size_bytes`` is that of the part that depends on no rows and ``row_bytes`` that of each row, of which the piece's
    number is known when the function is called; or the size is this one of the sizes that are noted.
    """

    op: What
    microbatch: int
    ends: tuple[int, int, int, int]  # the sending stage and replica, and the receiving ones
    begin: int
    end: int
    size_bytes: int
    row_bytes: int = 0
    noted: int | None = None


class Clock:
    """Collects times while a function is traced; they are one of its results.

    Args:
        host: this process's device, to which they come.
        measures: whether shapes do not tell how large things are.

    ``actions`` and ``crossings`` say what the times are of.
    """

    def __init__(self, host: str, measures: bool = False) -> None:
        self._host, self._measures = host, measures
        self._sizes: list[tf.Tensor] = []
        self._by_device: dict[str, list[tuple[int, tf.Tensor]]] = {}
        self._count = 0
        self.actions: list[Timed] = []
        self.crossings: list[Crossing] = []

    def now(self, after: Sequence[tf.Operation], device: str) -> tf.Tensor:
        """The time of day on a device when these operations are done."""
        with tf.device(_processor(device)), tf.control_dependencies(None), tf.control_dependencies(list(after)):
            return tf.timestamp()

    def add(self, time: tf.Tensor, device: str) -> int:
        """Take a device's time into the result; gives its place there."""
        self._by_device.setdefault(_processor(device), []).append((self._count, time))
        self._count += 1
        return self._count - 1

    def cross(self, crossing: Crossing, values: Any, device: str, measures: bool = False) -> None:
        """Note that these values of a device were sent; the crossing has everything but their size.

        ``measures``: whether shapes do not tell how large they are.
        """
        fixed, per_row = sizes_of(values)
        crossing = crossing._replace(size_bytes=fixed, row_bytes=per_row)
        present = [each for each in tf.nest.flatten(values, expand_composites=True) if each is not None]
        if (self._measures or measures) and present:
            with tf.device(_processor(device)):
                self._sizes.append(tf.add_n([tf.size(each, tf.int64) * each.dtype.size for each in present]))
            crossing = crossing._replace(noted=len(self._sizes) - 1)
        self.crossings.append(crossing)

    def sizes(self) -> tf.Tensor | None:
        """All sizes that are noted."""
        with tf.device(self._host):
            return tf.stack(self._sizes) if self._sizes else None

    def ends(self, number: int, time: tf.Tensor, device: str) -> None:
        """The action with this number, and those whose time is the same, end only then."""
        place, end = self.add(time, device), self.actions[number].end
        self.actions = [each._replace(end=place) if each.end == end else each for each in self.actions]

    def places(self) -> dict[str, list[int]]:
        """Which of the times are by the clock of each device."""
        return {device: [place for place, _ in found] for device, found in self._by_device.items()}

    def times(self) -> tf.Tensor:
        """All times, in the order of their places."""
        stacked: list[tf.Tensor] = []
        places: list[int] = []
        for device, found in self._by_device.items():  # one tensor comes from each device
            with tf.device(device):
                stacked.append(tf.stack([time for _, time in found]))
            places += [place for place, _ in found]
        with tf.device(self._host):
            joined = tf.concat([tf.identity(each) for each in stacked], 0)
            return tf.gather(joined, sorted(range(len(places)), key=lambda n: places[n]))


def ahead_s(device: str) -> float:
    """How far the clock of a device's process is ahead of this one's, 0 where that is too little to be told.

    The clock is read between two looks at the own one; what counts is the reading that took the shortest.
    """
    shortest_s, found_s = float("inf"), 0.0
    for _ in range(READINGS):
        before_s = time.time()
        with tf.device(device):
            there_s = float(tf.timestamp())
        after_s = time.time()
        if after_s - before_s < shortest_s:
            shortest_s, found_s = after_s - before_s, there_s - (before_s + after_s) / 2
    return found_s if abs(found_s) > shortest_s / 2 else 0.0


def sizes_of(values: Any) -> tuple[int, int]:
    """Bytes of tensors that a graph knows: of those without rows, and of a row of the others; 0 for what is open."""
    fixed = per_row = 0
    for each in tf.nest.flatten(values, expand_composites=True):
        if each is None:
            continue
        shape = each.shape
        if shape.rank and shape[0] is None:
            per_row += (shape[1:].num_elements() or 0) * each.dtype.size
        else:
            fixed += (shape.num_elements() or 0) * each.dtype.size
    return fixed, per_row


def _processor(device: str) -> str:
    """The device, or the first CPU device of the same process: others have no clock."""
    return device if is_processor(device) else processor_of(device)


class ProgramTimes:
    """What the times of a function are of; several W in one call have an equal part of its time each.

    Args:
        clock: of the function; None if it has none.
        microbatches: of a minibatch.
        replicas: of each stage.
    """

    def __init__(self, clock: Clock | None, microbatches: int, replicas: tuple[int, ...]) -> None:
        self.places = clock.places() if clock else {}  # of the times that are by each device's clock
        timed = clock.actions if clock else []
        self._crossings, self._microbatches, self._replicas = clock.crossings if clock else [], microbatches, replicas
        self._begins, self._ends = (np.array([each[n] for each in timed], int) for n in (-2, -1))
        calls = [(each.begin, each.end) for each in timed]
        of = np.array([calls.count(each) for each in calls])
        number = np.array([calls[:n].count(each) for n, each in enumerate(calls)])
        self._from, self._to = number / of, (number + 1) / of
        takers = {
            ("F" if each.action.op == "F" else "B", each.action.stage, each.replica, each.action.microbatch): n
            for n, each in enumerate(timed)
            if each.action.op in ("F", "B", "I")
        }
        arrived = [(takers.get((each.op, *each.ends[2:], each.microbatch)), each.end) for each in self._crossings]
        pairs = [(taker, place) for taker, place in arrived if taker is not None]
        self._takers, self._arrived = (np.array([each[n] for each in pairs], int) for n in (0, 1))
        self._spans = Spans.of(
            Span(
                each.action.op,
                each.action.stage,
                each.action.microbatch,
                each.device,
                0.0,
                0.0,
                each.version,
                each.replica,
            )
            for each in timed
        )

    def __len__(self) -> int:
        return len(self._spans)

    def busy_s(self, at_s: Any) -> float:
        """Seconds of all devices in actions."""
        begins_s, ends_s = self._seconds(at_s)
        return float((ends_s - begins_s).sum())

    def _seconds(self, at_s: Any) -> tuple[Any, Any]:
        """When each action began and ended, from the function's times."""
        begins_s, ends_s = at_s[self._begins], at_s[self._ends]
        took_s = np.maximum(ends_s - begins_s, 0.0)  # the clock may be set anew
        starts_s, ends_s = begins_s + took_s * self._from, begins_s + took_s * self._to
        # What is taken may be there a moment before its sender has looked at the clock.
        np.maximum.at(starts_s, self._takers, at_s[self._arrived])
        return np.minimum(starts_s, ends_s), ends_s

    def spans(self, minibatch: int, at_s: Any) -> Spans:
        """The actions, in the order of their begins; the program's minibatch 0 has this number."""
        begins_s, ends_s = self._seconds(at_s)
        microbatch, version = minibatch * self._microbatches + self._spans.microbatch, self._spans.version + minibatch
        made = replace(self._spans, microbatch=microbatch, version=version, start_s=begins_s, end_s=ends_s)
        return made[np.argsort(begins_s, kind="stable")]

    def transfers(self, minibatch: int, rows: Mapping[int, int], at_s: Any, sizes: Any = None) -> Transfers:
        """What was sent, in the order in which it was begun, of minibatches with so many rows; sizes as noted."""
        first, found = minibatch * self._microbatches, []
        for each in self._crossings:
            size, (stage, sender, other, receiver) = each.size_bytes, each.ends
            if each.noted is not None:
                size = int(sizes[each.noted])
            elif each.row_bytes:
                which, number = divmod(each.microbatch, self._microbatches)
                parts = Parts(rows[which], self._microbatches)
                pieces = parts.pieces(number, self._replicas[stage], self._replicas[other])
                size += each.row_bytes * sum(
                    piece.stop - piece.start for piece in pieces if (piece.sender, piece.receiver) == (sender, receiver)
                )
            begin_s, end_s = float(at_s[each.begin]), max(float(at_s[each.begin]), float(at_s[each.end]))
            found.append(Transfer(each.op, first + each.microbatch, *each.ends, size, begin_s, end_s))
        return Transfers.of(sorted(found, key=lambda sent: sent.start_s))
