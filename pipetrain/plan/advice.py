"""Which way to train is fastest, and why: what has been predicted of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipetrain.plan.profile import mib
from pipetrain.plan.schedule_advice import ScheduleAdvice
from pipetrain.plan.stages import Partition
from pipetrain.plan.text_table import text_table

WAYS = ("single", "data-parallel", "pipeline", "hybrid")  # the simplest first
MARGIN = 1.05  # what a less simple way must gain to be worth it


class Ordered(NamedTuple):
    """Data parallelism whose transfers are ordered: how many devices, the simulated rate, what each device keeps."""

    devices: int
    samples_per_second: float
    memory_bytes: int


@dataclass(frozen=True)
class Advice:
    """The ways to train one model on some devices, the simplest first, and the recommended one; prints as tables.

    ``ways`` are ``single``, ``data-parallel`` (one stage on several devices), ``pipeline`` (every stage one device) and
    ``hybrid`` (stages with several), each with its fastest partition, or None where it does not fit the devices'
    memory. A way that is the best cut of none is not there: ``hybrid`` where a simpler one is faster than any.
    ``ordered`` are the schemes beside them whose transfers are ordered, those that fit, see ``beside``. ``schedules``
    are those that the pipeline may have, where one is asked about that trains as the unsplit model does.
    """

    ways: dict[str, Partition | None]
    recommended: str
    reason: str
    ordered: Mapping[str, Ordered] = field(default_factory=dict)
    schedules: ScheduleAdvice | None = None

    def __str__(self) -> str:
        best = self.ways.get(self.recommended)  # an ordered scheme has no stages
        return f"{best}\n\n{self.comparison()}" if best else self.comparison()

    def beside(self, ordered: Mapping[str, Ordered]) -> Advice:
        """The advice with these schemes beside, one of which is recommended if it is 5% faster than what is so far."""
        way = self.ways[self.recommended]
        found = replace(self, ordered=ordered)
        if way is None or not ordered:
            return found
        best = max(ordered, key=lambda name: ordered[name].samples_per_second)
        gain = ordered[best].samples_per_second / way.samples_per_second
        if gain < MARGIN:
            return found
        reason = (
            f"Its transfers go on while its devices compute: simulated, {gain:.2f}x {self.recommended}, the best of "
            f"the others. {self.reason}"
        )
        return replace(found, recommended=best, reason=reason)

    def comparison(self) -> str:
        """The table of ways, and what is recommended and why; and so for schedules."""
        one = self.ways["single"]

        def row(name: str, devices: int, rate: float, memory_bytes: int) -> tuple[str, ...]:
            gain = f"{rate / one.samples_per_second:.2f}x" if one else "-"
            return name, str(devices), f"{rate:.0f}", gain, mib(memory_bytes)

        rows: list[tuple[str, ...]] = []
        for name in WAYS:
            way = self.ways.get(name)
            if way is None:
                rows.append((name, "-", "-", "-", "does not fit" if name in self.ways else "not faster"))
            else:
                rows.append(row(name, way.devices, way.samples_per_second, way.fullest_bytes))
        rows += [row(name, *scheme) for name, scheme in self.ordered.items()]
        header = ("way to train", "devices", "samples/s", "against one", "memory MiB")
        schedules = f"\n\n{self.schedules}" if self.schedules else ""
        return f"{text_table(header, rows)}\n\nRecommended: {self.recommended}. {self.reason}{schedules}"
