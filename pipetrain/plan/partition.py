"""Cut a chain of blocks into stages so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipetrain.plan.cost import PCIE_3, Link, stage_seconds
from pipetrain.plan.profile import Profile, mib
from pipetrain.plan.table import table


@dataclass(frozen=True)
class StagePlan:
    """Blocks ``first`` to ``last`` (both included) of the chain, and the seconds they take per minibatch."""

    first: str
    last: str
    blocks: int
    forward_s: float
    backward_s: float
    weight_bytes: int
    output_bytes: int
    total_s: float


@dataclass(frozen=True)
class Partition:
    """A chain of blocks cut into stages; prints as a table."""

    model: str
    batch_size: int
    stages: tuple[StagePlan, ...]

    @property
    def cuts(self) -> tuple[str, ...]:
        """The last block of every stage but the final one."""
        return tuple(stage.last for stage in self.stages[:-1])

    @property
    def slowest_s(self) -> float:
        """Seconds per minibatch of the slowest stage: the pipeline's own bound."""
        return max(stage.total_s for stage in self.stages)

    @property
    def speedup(self) -> float:
        """The bound on the pipeline's throughput against one device: compute of all stages / slowest stage."""
        return sum(stage.forward_s + stage.backward_s for stage in self.stages) / self.slowest_s

    def __str__(self) -> str:
        rows = [
            (
                f"{k}: {stage.first} - {stage.last}",
                str(stage.blocks),
                f"{stage.forward_s * 1e3:.2f}",
                f"{stage.backward_s * 1e3:.2f}",
                mib(stage.weight_bytes),
                mib(stage.output_bytes),
                f"{stage.total_s / self.slowest_s:.0%}",
            )
            for k, stage in enumerate(self.stages)
        ]
        header = ("stage", "blocks", "forward ms", "backward ms", "weights MiB", "sends MiB", "load")
        title = (
            f"{self.model}: {len(self.stages)} stages, batch {self.batch_size}, at most "
            f"{self.batch_size / self.slowest_s:.0f} samples/s ({self.speedup:.2f}x one device)"
        )
        return f"{title}\n{table(header, rows)}"


def partition(profile: Profile, num_devices: int, link: Link = PCIE_3) -> Partition:
    """Cut the profiled chain into ``num_devices`` stages, one a device.

    Minimises the slowest stage, its transfers included, by dynamic programming over
    ``T(j, n) = min over i of max(T(i, n-1), cost[i, j])`` (PipeDream, arXiv 1806.03377, section 3.3); among the
    cuts that reach this optimum, the one whose stages are most even (least sum of squared seconds).
    Raises ValueError when there are fewer blocks than devices.
    """
    blocks = len(profile.blocks)
    if not 1 <= num_devices <= blocks:
        raise ValueError(
            f"A chain of {blocks} blocks can be cut into 1 to {blocks} stages. Received: num_devices={num_devices}. "
            "Try fewer devices or a deeper model."
        )
    cost = stage_seconds(profile, link)
    bound = _smallest_maximum(cost, num_devices)
    allowed = np.where(cost <= bound * (1 + 1e-12), cost**2, np.inf)
    return plan(profile, _cheapest_ends(allowed, num_devices), link)


def plan(profile: Profile, ends: list[int], link: Link = PCIE_3) -> Partition:
    """The partition whose stage n ends before block ``ends[n]``."""
    cost = stage_seconds(profile, link)
    stages = []
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        part = profile.blocks[first:end]
        stages.append(
            StagePlan(
                first=part[0].name,
                last=part[-1].name,
                blocks=len(part),
                forward_s=sum(block.forward_s for block in part),
                backward_s=sum(block.backward_s for block in part),
                weight_bytes=sum(block.weight_bytes for block in part),
                output_bytes=part[-1].output_bytes if end < len(profile.blocks) else 0,
                total_s=float(cost[first, end]),
            )
        )
    return Partition(model=profile.model, batch_size=profile.batch_size, stages=tuple(stages))


def _smallest_maximum(cost: NDArray[np.float64], stages: int) -> float:
    best = cost[0]
    for _ in range(stages - 1):
        best = np.maximum(best[:, None], cost).min(axis=0)
    return float(best[-1])


def _cheapest_ends(cost: NDArray[np.float64], stages: int) -> list[int]:
    """Where each stage ends in the cut with the least sum of costs."""
    best, came_from = cost[0], []
    for _ in range(stages - 1):
        total = best[:, None] + cost
        came_from.append(total.argmin(axis=0))
        best = total.min(axis=0)
    ends = [len(best) - 1]
    for previous in reversed(came_from):
        ends.append(int(previous[ends[-1]]))
    return ends[::-1]
