"""Every way to train one model on some devices, with what is predicted of it, and the one that is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipetrain.plan.profile import Profile, mib, unsteady
from pipetrain.plan.stages import Partition
from pipetrain.plan.text_table import text_table

MARGIN = 1.03  # what a less simple way must gain to be worth it
ERRORS = 2  # standard errors of the profile to either side of a prediction
HEADER = ("way to train", "devices", "samples/s", "between", "against one", "memory MiB")
KINDS = ("single", "data parallelism", "grid", "pipeline", "hybrid")  # the simplest first


class Way(NamedTuple):
    """One way to train: the ``arguments`` of ``PipelineModel`` for it, and what is predicted.

    ``kind`` is one of ``KINDS``; ``step_s`` are the seconds of a minibatch, ``memory_bytes`` what the fullest device
    holds, ``fits`` whether that keeps to the limit.
    """

    kind: str
    arguments: Mapping[str, Any]
    devices: int
    step_s: float
    memory_bytes: int
    fits: bool = True

    def __str__(self) -> str:
        scheme, *others = [(name, value) for name, value in self.arguments.items() if name not in ("cuts", "order")]
        return ", ".join([str(scheme[1]), *(f"{name} {_listed(value)}" for name, value in others)])


@dataclass(frozen=True)
class Choice:
    """The ways to train a model, of which one is ``taken``; prints as a table.

    Taken is the simplest that fits the devices' memory and is within 3% of the fastest that fits.

    Args:
        batch_size: rows of a minibatch.
        ways: that were predicted, one device first.
        spread: the standard error of the profile's seconds, as a part of them.
        cut: that of the way taken, if it is a pipeline.
        least_s: what no cut's slowest stage can be below, see ``least_slowest_s``.
        limit_bytes: the memory of a device, None for no limit.
    """

    batch_size: int
    ways: Sequence[Way]
    spread: float = 0.0
    cut: Partition | None = None
    least_s: float = 0.0
    limit_bytes: int | None = None

    @property
    def taken(self) -> Way:
        """The way to train. Raises ValueError if none fits the memory."""
        possible = [way for way in self.ways if way.fits]
        if not possible:
            leanest = min(self.ways, key=lambda way: way.memory_bytes)
            raise ValueError(
                f"No way to train fits the devices. Received: a memory of {mib(self.limit_bytes or 0)} MiB each; the "
                f"leanest way, {leanest}, needs {mib(leanest.memory_bytes)}. Try more devices, smaller minibatches or "
                "recompute=True."
            )
        fastest_s = min(way.step_s for way in possible)
        near = [way for way in possible if way.step_s <= MARGIN * fastest_s]
        return min(near, key=lambda way: (KINDS.index(way.kind), way.step_s))

    @property
    def gap(self) -> float | None:
        """By how much the slowest stage of the cut taken may exceed the best cut's, at most; None without a cut."""
        return self.cut.slowest_s / self.least_s - 1 if self.cut and self.least_s else None

    @property
    def reason(self) -> str:
        """Why this way is taken, in a sentence."""
        taken, one = self.taken, next((way for way in self.ways if way.kind == KINDS[0] and way.fits), None)
        others = [way for way in self.ways if way.fits and way.kind != taken.kind]
        parts = []
        if one is not None and one != taken:
            parts.append(f"it is predicted to be {one.step_s / taken.step_s:.2f}x as fast as one device")
        if others:
            best = min(others, key=lambda way: way.step_s)
            than = best.step_s / taken.step_s
            if than >= MARGIN:
                parts.append(f"{than:.2f}x as fast as the best of another kind, {best}")
            else:
                parts.append(f"no way of another kind is {MARGIN - 1:.0%} faster (the best is {best})")
        faster = [way for way in self.ways if not way.fits and way.step_s * MARGIN < taken.step_s]
        if faster:
            first = min(faster, key=lambda way: way.step_s)
            parts.append(f"{first} would be {taken.step_s / first.step_s:.2f}x as fast, and does not fit")
        said = "; ".join(parts) or "there is no other"
        return f"{said[0].upper()}{said[1:]}."

    def __str__(self) -> str:
        one = next((way for way in self.ways if way.kind == KINDS[0]), None)
        rows = [self._row(way, one) for way in sorted(self.ways, key=lambda way: way.step_s)]
        told = ", ".join(f"{name}={value!r}" for name, value in self.taken.arguments.items())
        lines = [text_table(HEADER, rows), "", f"Taken: {told}. {self.reason}"]
        if self.gap is not None:
            lines.append(f"No cut has a slowest stage that is more than {self.gap:.0%} faster.")
        if warning := unsteady(self.spread):
            lines.append(warning)
        return "\n".join(lines)

    def _row(self, way: Way, one: Way | None) -> tuple[str, ...]:
        rate, part = self.batch_size / way.step_s, ERRORS * self.spread
        between = f"{rate / (1 + part):.0f} - {rate / (1 - part):.0f}" if part < 1 else f"{rate / (1 + part):.0f} -"
        gain = f"{one.step_s / way.step_s:.2f}x" if one else "-"
        memory = mib(way.memory_bytes) if way.fits else f"{mib(way.memory_bytes)}, too much"
        return str(way), str(way.devices), f"{rate:.0f}", between, gain, memory


def least_slowest_s(profile: Profile, devices: int, replicate: bool = False) -> float:
    """What the slowest stage of any cut for so many devices takes at least, in seconds a minibatch.

    ``max(sum(f + b + u) / devices, max(f + b + u))`` over the blocks' forward, backward and update, each with its
    faster kernels; with ``replicate``, stages have several devices, which share forward and backward but not updates:
    ``sum(f + b) / devices``. Transfers are left out.
    """
    each = [min((block.seconds, block.compiled or block.seconds), key=lambda s: s.total_s) for block in profile.trained]
    if replicate:
        return sum(min(b.seconds.forward_s + b.seconds.backward_s, s.forward_s + s.backward_s)
                   for b, s in zip(profile.trained, each, strict=True)) / devices  # fmt: skip
    return max(sum(seconds.total_s for seconds in each) / devices, max(seconds.total_s for seconds in each))


def _listed(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
