"""Which synchronous schedule is fastest under a memory limit, and why: what has been predicted of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipetrain.plan.profile import mib
from pipetrain.plan.text_table import text_table
from pipetrain.schemes.table import CHUNKED

MARGIN = 1.05  # what a less simple schedule must gain to be worth it
HEADER = (
    "synchronous schedule", "stages a device", "microbatches", "samples/s", "against as set", "waiting", "memory MiB",
)  # fmt: skip
SAME = 1.01  # rates nearer to each other are equal


class Trial(NamedTuple):
    """A schedule with so many stages a device and microbatches a minibatch, and what is predicted of it.

    ``halves``: whether its backwards are in halves. ``waiting`` is the share of all devices' time outside any action,
    ``memory_bytes`` what the fullest device holds, ``fits`` whether that keeps to the limit.
    """

    scheme: str
    chunks: int
    microbatches: int
    halves: bool
    samples_per_second: float
    waiting: float
    memory_bytes: int
    fits: bool = True

    def __str__(self) -> str:
        return f"{self.scheme} with {self.microbatches} microbatches"


@dataclass(frozen=True)
class ScheduleAdvice:
    """Every synchronous schedule with the best number of microbatches; prints as a table with the recommended one.

    ``as_set`` is the training that was asked about, None where it cannot be planned; ``left_out`` are schedules that
    have more stages than the model has blocks. Recommended is the simplest that fits and is within 5% of the fastest
    that fits; None if none fits ``limit_bytes``, the memory of a device.
    """

    trials: Sequence[Trial]
    as_set: Trial | None = None
    left_out: Sequence[str] = ()
    limit_bytes: int | None = None

    @property
    def recommended(self) -> Trial | None:
        """The simplest of those that fit and are not clearly slower than another that fits."""
        possible = [trial for trial in self.trials if trial.fits]
        if not possible:
            return None
        fastest = max(trial.samples_per_second for trial in possible)
        return _simplest([trial for trial in possible if trial.samples_per_second * MARGIN >= fastest])

    @property
    def reason(self) -> str:
        """Why this one: what it gains over the simplest one, and which faster one the limit excludes."""
        best, limit = self.recommended, mib(self.limit_bytes or 0)
        if best is None:
            leanest = min(self.trials, key=lambda trial: trial.memory_bytes)
            return (
                f"The leanest, {leanest}, needs {mib(leanest.memory_bytes)} MiB on a device, of which each has {limit}."
            )
        plain = _simplest([trial for trial in self.trials if trial.fits])
        why = "no other that fits is 5% faster"
        if best != plain:
            gain = best.samples_per_second / plain.samples_per_second
            why = (
                f"it is {gain:.2f}x as fast as {plain}; its devices wait for {best.waiting:.0%} of the time, the "
                f"other's for {plain.waiting:.0%}"
            )
        faster = [trial for trial in self.trials if trial.samples_per_second >= MARGIN * best.samples_per_second]
        if faster:  # which then do not fit
            first = max(faster, key=lambda trial: trial.samples_per_second)
            gain, needed = first.samples_per_second / best.samples_per_second, mib(first.memory_bytes)
            why += (
                f"; {first} would be {gain:.2f}x as fast, and needs {needed} MiB on a device, of which each has {limit}"
            )
        return f"{why[0].upper()}{why[1:]}."

    def __str__(self) -> str:
        rows = [_row(trial.scheme, trial, self.as_set) for trial in self.trials]
        if self.as_set is not None:
            rows = [_row(f"as set: {self.as_set.scheme}", self.as_set, self.as_set), *rows]
        lines = [text_table(HEADER, rows)]
        if self.left_out:
            lines.append(f"The model has too few layers for {', '.join(self.left_out)}.")
        best = self.recommended
        if best is None:
            return "\n".join([*lines, "", f"No synchronous schedule fits. {self.reason}"])
        return "\n".join([*lines, "", f"Recommended of these: {_arguments(best)}. {self.reason}"])


def _row(name: str, trial: Trial, against: Trial | None) -> tuple[str, ...]:
    return (
        name,
        str(trial.chunks),
        str(trial.microbatches),
        f"{trial.samples_per_second:.0f}",
        f"{trial.samples_per_second / against.samples_per_second:.2f}x" if against else "-",
        f"{trial.waiting:.0%}",
        mib(trial.memory_bytes) if trial.fits else f"{mib(trial.memory_bytes)}, too much",
    )


def _simplest(trials: Sequence[Trial]) -> Trial:
    """Of those with the fewest stages a device, with whole backwards if some have them, the fastest.

    Of equally fast ones it is that with the least memory.
    """
    first = min((trial.chunks, trial.halves) for trial in trials)
    alike = [trial for trial in trials if (trial.chunks, trial.halves) == first]
    fastest = max(trial.samples_per_second for trial in alike)
    same = [trial for trial in alike if trial.samples_per_second * SAME >= fastest]
    return min(same, key=lambda trial: (trial.memory_bytes, -trial.samples_per_second))


def _arguments(trial: Trial) -> str:
    """How ``PipelineModel`` is told."""
    chunks = f", chunks={trial.chunks}" if trial.scheme in CHUNKED else ""
    return f"scheme={trial.scheme!r}{chunks}, microbatches={trial.microbatches}"
