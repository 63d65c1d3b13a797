"""Cut a chain of blocks into stages so that the slowest stage is as fast as it can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.cost import Costs, Place
from pipetrain.plan.memory import Training, demand
from pipetrain.plan.profile import Profile, mib
from pipetrain.plan.search import Choice, Objective, Problem, search
from pipetrain.plan.table import table


@dataclass(frozen=True)
class StagePlan:
    """Blocks ``first`` to ``last`` (both included) of the chain on ``replicas`` devices, and what they cost.

    Forward, backward and update seconds and ``sent_bytes`` are per minibatch, for all replicas together; ``total_s``
    is what one replica takes per minibatch, transfers included; ``memory_bytes`` what each keeps at its fullest.
    """

    first: str
    last: str
    blocks: int
    forward_s: float
    backward_s: float
    weight_bytes: int
    output_bytes: int
    total_s: float
    update_s: float = 0.0
    replicas: int = 1
    device: int = 0
    sent_bytes: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Partition:
    """A chain of blocks cut into stages; prints as a table."""

    model: str
    batch_size: int
    stages: tuple[StagePlan, ...]
    training: Training = Training()

    @property
    def cuts(self) -> tuple[str, ...]:
        """The last block of every stage but the final one."""
        return tuple(stage.last for stage in self.stages[:-1])

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many devices each stage has."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def slowest_s(self) -> float:
        """Seconds per minibatch of the slowest stage: the pipeline's own bound."""
        return max(stage.total_s for stage in self.stages)

    @property
    def samples_per_second(self) -> float:
        """The predicted throughput once the pipeline is full: one minibatch per ``slowest_s``."""
        return self.batch_size / self.slowest_s

    @property
    def speedup(self) -> float:
        """The bound on the pipeline's throughput against one device: compute of all stages / slowest stage."""
        return sum(stage.forward_s + stage.backward_s + stage.update_s for stage in self.stages) / self.slowest_s

    def __str__(self) -> str:
        rows = [
            (
                f"{k}: {stage.first} - {stage.last}",
                str(stage.blocks),
                str(stage.replicas),
                f"{stage.forward_s * 1e3:.2f}",
                f"{stage.backward_s * 1e3:.2f}",
                f"{stage.weight_bytes // 4:,}",
                mib(stage.memory_bytes),
                mib(stage.sent_bytes),
                f"{stage.total_s / self.slowest_s:.0%}",
            )
            for k, stage in enumerate(self.stages)
        ]
        header = (
            "stage", "blocks", "replicas", "forward ms", "backward ms", "parameters", "memory MiB", "sends MiB", "load",
        )  # fmt: skip
        title = (
            f"{self.model}: {len(self.stages)} stages, batch {self.batch_size}, at most "
            f"{self.samples_per_second:.0f} samples/s ({self.speedup:.2f}x one device)"
        )
        return f"{title}\n{table(header, rows)}"


class NoPlan(ValueError):
    """No cut of the model fits the devices' memory."""


def partition(
    profile: Profile,
    num_devices: int,
    cluster: Cluster | None = None,
    *,
    replicate: bool = False,
    training: Training | None = None,
) -> Partition:
    """Cut the profiled chain into ``num_devices`` stages, one a device, or share the devices out as is best.

    Minimises the slowest stage, its transfers included, by dynamic programming over
    ``T(i, a) = min over j, r of max(cost[i, j, r, a], T(j, a + r))`` (PipeDream, arXiv 1806.03377, section 3.3);
    among the cuts that reach this optimum, the one whose stages are most even (least sum of squared seconds).

    Args:
        profile: what the blocks cost.
        num_devices: how many devices there are.
        cluster: how they are joined and what they hold; by default PCIe 3.0, memory without end.
        replicate: let a stage have several devices, each of which does its share of every minibatch's rows, and
            leave devices unused where they would not help.
        training: scheme, optimizer slots, microbatches and recomputation, which decide on the memory.

    Raises:
        ValueError: fewer blocks than devices (without ``replicate``); no cut that fits the memory, naming the stage
            that is too large in the leanest one, and what would help.
    """
    cluster, training = cluster or Cluster(), training or Training()
    blocks = len(profile.blocks)
    if num_devices < 1 or (num_devices > blocks and not replicate):
        raise ValueError(
            f"A chain of {blocks} blocks can be cut into 1 to {blocks} stages. Received: num_devices={num_devices}. "
            "Try fewer devices or a deeper model."
        )
    costs = Costs(profile, cluster)
    exact = None if replicate else num_devices
    most = num_devices if replicate else 1
    problem = Problem(costs, costs.compute_s, num_devices, most, exact, counted=False)
    found = search(problem, lambda i, j, place, n: costs.seconds(i, j, place))
    assert found is not None  # without a limit there is always a way
    best = _described(profile, costs, found, training)
    if cluster.memory_bytes is None or _fullest(best) <= cluster.memory_bytes:
        return best
    return _within_memory(profile, costs, problem, training)


def plan(
    profile: Profile,
    ends: Sequence[int],
    cluster: Cluster | None = None,
    replicas: Sequence[int] | None = None,
    training: Training | None = None,
) -> Partition:
    """The partition whose stage n ends before block ``ends[n]`` and has ``replicas[n]`` devices, one after another."""
    costs = Costs(profile, cluster or Cluster())
    counts = replicas or [1] * len(ends)
    choices, first, device = [], 0, 0
    for end, count in zip(ends, counts, strict=True):
        choices.append(Choice(first, end, Place(device, count, device + count)))
        first, device = end, device + count
    return _described(profile, costs, choices, training or Training())


def _within_memory(profile: Profile, costs: Costs, problem: Problem, training: Training) -> Partition:
    """The fastest partition whose stages fit; what a stage keeps depends on how many stages follow it."""
    limit = costs.cluster.memory_bytes
    assert limit is not None

    def objective(memory: Objective) -> Objective:
        return lambda i, j, place, n: np.where(memory(i, j, place, n) <= limit, costs.seconds(i, j, place), np.inf)

    fitting = [
        found
        for found in _by_length(profile, costs, problem, training, objective, enough=lambda x: _fullest(x) <= limit)
        if _fullest(found) <= limit
    ]
    if not fitting:
        raise NoPlan(_what_would_fit(profile, costs, problem, training))
    return min(fitting, key=lambda each: each.slowest_s)


def _leanest(profile: Profile, costs: Costs, problem: Problem, training: Training) -> Partition:
    """The partition whose fullest device holds least."""
    anything = problem._replace(work=np.zeros_like(problem.work))
    first = _described(profile, costs, [Choice(0, costs.blocks, Place(0, 1, 1))], training)
    found = list(_by_length(profile, costs, anything, training, lambda memory: memory, enough=lambda x: False))
    return min(found or [first], key=_fullest)


def _by_length(
    profile: Profile,
    costs: Costs,
    problem: Problem,
    training: Training,
    objective: Callable[[Objective], Objective],
    enough: Callable[[Partition], bool],
) -> Iterator[Partition]:
    """The best partition of any length by an objective made from a stage's memory, and then of every length.

    The first search takes every stage to keep what it would if the pipeline began with it. That is less than or
    equal to what it keeps: if the partition found is ``enough`` even so, no other length can be better.
    """
    lengths = [problem.stages] if problem.stages else [None, *range(1, min(problem.devices, costs.blocks) + 1)]
    for total in lengths:

        def memory(i: Any, j: Any, place: Place, n: int, total: int | None = total) -> Any:
            stages = total or n
            return costs.memory(i, j, place.replicas, demand(training, stages - n, stages))

        found = search(problem._replace(counted=True, stages=total), objective(memory))
        if found is not None:
            partition = _described(profile, costs, found, training)
            yield partition
            if total is None and enough(partition):
                return


def _what_would_fit(profile: Profile, costs: Costs, problem: Problem, training: Training) -> str:
    limit = costs.cluster.memory_bytes
    assert limit is not None
    leanest = _leanest(profile, costs, problem, training)
    stage = max(leanest.stages, key=lambda each: each.memory_bytes)
    helps = []
    others = {
        "recompute=True": training._replace(recompute=True),
        "scheme='vanilla', which keeps no old weights": training._replace(scheme="vanilla"),
        "scheme='1f1b' with 8 microbatches": training._replace(scheme="1f1b", microbatches=8),
    }
    for what, other in others.items():
        fullest = _fullest(_leanest(profile, costs, problem, other))
        if fullest < stage.memory_bytes * 0.99:
            helps.append(f"{what} ({mib(fullest)} MiB)")
    helps.append("a smaller batch, or more devices")
    return (
        f"No cut of {profile.model!r} fits the devices' memory: in the leanest one, stage "
        f"{leanest.stages.index(stage)} ({stage.first} - {stage.last}) keeps {mib(stage.memory_bytes)} MiB a device, "
        f"{mib(stage.memory_bytes - limit)} MiB too much. Received: memory_bytes={limit} ({mib(limit)} MiB), "
        f"devices={problem.devices}, scheme={training.scheme!r}. Try {'; '.join(helps)}."
    )


def _fullest(partition: Partition) -> int:
    return max(stage.memory_bytes for stage in partition.stages)


def _described(profile: Profile, costs: Costs, choices: Sequence[Choice], training: Training) -> Partition:
    stages = []
    for n, (first, end, place) in enumerate(choices):
        part = profile.blocks[first:end]
        needs = demand(training, n, len(choices))
        stages.append(
            StagePlan(
                first=part[0].name,
                last=part[-1].name,
                blocks=len(part),
                forward_s=sum(block.forward_s for block in part),
                backward_s=sum(block.backward_s for block in part),
                weight_bytes=sum(block.weight_bytes for block in part),
                output_bytes=part[-1].output_bytes if end < len(profile.blocks) else 0,
                total_s=float(costs.seconds(first, end, place)),
                update_s=sum(block.update_s for block in part),
                replicas=place.replicas,
                device=place.device,
                sent_bytes=int(costs.sent_bytes(first, end, place.replicas)),
                memory_bytes=math.ceil(costs.memory(first, end, place.replicas, needs)),
            )
        )
    return Partition(profile.model, profile.batch_size, tuple(stages), training)
