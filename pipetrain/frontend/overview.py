"""What a PipelineModel shows of itself: a line, a table and a picture of its stages. Nothing is measured for these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipetrain.cluster.connection import task_of
from pipetrain.frontend.planner import Planner
from pipetrain.logs import counted, text_table
from pipetrain.plan.choice import Choice
from pipetrain.plan.profile import mib
from pipetrain.plan.stages import Partition
from pipetrain.schemes.table import AUTO, UNCUT

if TYPE_CHECKING:
    from pipetrain.pictures.figure import Picture

LISTED = 4  # names that a line has one by one; of more the first and the last


class StageRow(NamedTuple):
    """One stage: its first and last block, how many it has, on which devices it is, and its trained parameters."""

    first: str
    last: str
    blocks: int
    devices: list[str]
    parameters: int


class Overview:
    """What is known of a model's training.

    Args:
        name: the model's.
        scheme: that it is trained by, or ``auto`` while none is chosen.
        planner: of the strategy that trains it.
        choice: among which the scheme was chosen, None where none was.
        devices: full names of all that may be used.
    """

    def __init__(self, name: str, scheme: str, planner: Planner, choice: Choice | None, devices: Sequence[str]) -> None:
        self._name, self._scheme, self._planner, self._choice = name, scheme, planner, choice
        self._devices = [*map(short_name, devices)]

    @property
    def line(self) -> str:
        """Scheme, stages or workers, devices, and the cut, as far as they are decided."""
        return f"{self._name}: {'; '.join([self._way, *([] if self._scheme == AUTO else self._cut)])}"

    @property
    def _way(self) -> str:
        on = f"{counted(len(self._devices), 'device')} ({listed(self._devices)})"
        if self._scheme == AUTO:
            return f"auto, not chosen yet; {on}"
        scheme = f"{self._scheme} (chosen by auto)" if self._choice is not None else self._scheme
        if self._scheme in UNCUT:
            return f"{scheme} on {on}"
        return f"{scheme}, {counted(self._planner.layout.stages, 'stage')} on {on}"

    @property
    def _cut(self) -> list[str]:
        if self._planner.layout.stages == 1:
            return []
        rows = self.rows
        return [f"cut after {listed([row.last for row in rows[:-1]])}" if rows else "not cut yet"]

    @property
    def rows(self) -> list[StageRow]:
        """Every stage; none while the cut, or the way to train, is open."""
        ends, blocks = self._planner.layout.ends, self._planner.chain.blocks
        if ends is None or self._scheme == AUTO:
            return []
        found = []
        for first, end, devices in zip([0, *ends[:-1]], ends, self._planner.layout.devices_of_stages, strict=True):
            part = blocks[first:end]
            weights = {id(each): each for block in part for call in block.calls for each in call.weights}
            parameters = sum(math.prod(each.shape) for each in weights.values())
            found.append(StageRow(part[0].name, part[-1].name, len(part), [*map(short_name, devices)], parameters))
        return found

    @property
    def planned(self) -> Partition | None:
        """The plan by which it is cut; None where nothing was planned."""
        return None if self._scheme == AUTO else self._planner.planned

    @property
    def text(self) -> str:
        """A table of the stages, with a sentence on what is not decided yet."""
        rows, planned = self.rows, self.planned
        lines = [self.line]
        if rows:
            header: tuple[str, ...] = ("stage", "layers", "devices", "trained parameters")
            cells: list[tuple[str, ...]] = [
                (
                    f"{n}: {row.first}" + (f" - {row.last}" if row.blocks > 1 else ""),
                    *(str(row.blocks), listed(row.devices, 2), f"{row.parameters:,}"),
                )
                for n, row in enumerate(rows)
            ]
            held = self._held(planned, len(rows))
            if held:
                header = (*header, "planned memory MiB")
                cells = [(*row, mib(each)) for row, each in zip(cells, held, strict=True)]
            lines.append(text_table(header, cells))
        return "\n".join([*lines, *self._open(bool(rows))])

    def _held(self, planned: Partition | None, stages: int) -> list[int]:
        """What each stage's devices hold by the plan; nothing where that is not known."""
        if planned is not None and self._scheme not in UNCUT:
            return [stage.memory_bytes for stage in planned.stages]
        if self._choice is not None and stages == 1:
            return [self._choice.taken.memory_bytes]
        return []

    def _open(self, is_cut: bool) -> list[str]:
        if self._scheme == AUTO:
            return ["The way to train is not chosen yet: the first fit does that; explain(batch_size) shows the ways."]
        if not is_cut:
            return ["The cut is not decided yet: the first fit measures the layers, or partition(batch_size) does."]
        return []

    def plot(self) -> Picture:
        """The stages with what they take and hold by the plan; where nothing is planned, with their parameters.

        Raises ValueError where the way to train, or the cut, is open.
        """
        from pipetrain.plan import pictures

        rows, planned = self.rows, self.planned
        if not rows:
            what = "a way that is not chosen" if self._scheme == AUTO else "a cut that is not decided"
            how = "explain(batch_size).choice.plot()" if self._scheme == AUTO else "partition(batch_size).plot()"
            raise ValueError(
                f"There are no stages to draw yet. Received: scheme={self._scheme!r} with {what}. "
                f"Try it after fit, or {how}, which measures the model."
            )
        if planned is None or self._scheme in UNCUT:
            counts = {f"stage {n}: {row.first} - {row.last}": row.parameters for n, row in enumerate(rows)}
            return pictures.parameters(self.line, counts)
        names = {
            stage.device + n: name
            for stage, row in zip(planned.stages, rows, strict=True)
            for n, name in enumerate(row.devices)
        }
        return pictures.partition(planned, names, f"{self._name}: {self._way}")


def short_name(device: str) -> str:
    """Of a device by its full name: ``CPU:0``, of a worker ``worker 1 CPU:0``."""
    task, name = task_of(device), device.rpartition("device:")[2]
    return name if task is None else f"worker {task} {name}"


def listed(names: Sequence[str], most: int = LISTED) -> str:
    """The names; of more than so many the first and the last."""
    return ", ".join(names) if len(names) <= most else f"{names[0]} to {names[-1]}"
