"""The times that a program's function gives, as spans of actions and transfers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pipetrain.compute.program.clock import Clock
from pipetrain.schemes.parts import Parts
from pipetrain.trace.records import Span, Spans, Transfer, Transfers


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
