"""Cut a chain of blocks into stages so that the slowest stage is as fast as it can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.cost import Costs, Memory, Place
from pipetrain.plan.memory import Training, demand
from pipetrain.plan.profile import Profile, mib
from pipetrain.plan.schemes import SCHEMES
from pipetrain.plan.search import CLOSE, HUGE, NEVER, Choice, Limit, Problem, Reach, fastest, most_even
from pipetrain.plan.table import table

DEFAULT_TRAINING = Training()


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
    """A chain of blocks cut into stages, of whose devices ``processors`` work at once; prints as a table."""

    model: str
    batch_size: int
    stages: tuple[StagePlan, ...]
    training: Training = DEFAULT_TRAINING
    processors: float = math.inf

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
    def step_s(self) -> float:
        """Predicted seconds per minibatch once the pipeline is full: those of the slowest stage.

        Synchronous schemes fill and empty the pipeline for every minibatch: ``(1 + (N-1)/M)`` times as many. With fewer
        processors than devices, all stages' work divided by the processors, if that is more.
        """
        work_s = sum(stage.total_s * stage.replicas for stage in self.stages)
        synchronous = not SCHEMES[self.training.scheme].asynchronous
        flushes = (len(self.stages) - 1) / self.training.microbatches if synchronous else 0
        return max((1 + flushes) * self.slowest_s, work_s / self.processors)

    @property
    def samples_per_second(self) -> float:
        """The predicted throughput once the pipeline is full: one minibatch per ``step_s``."""
        return self.batch_size / self.step_s

    @property
    def speedup(self) -> float:
        """The bound on the pipeline's throughput against one device: compute of all stages / ``step_s``."""
        return sum(stage.forward_s + stage.backward_s + stage.update_s for stage in self.stages) / self.step_s

    @property
    def sent_bytes(self) -> int:
        """What all devices together send per minibatch: activations, their gradients, and weights' gradients to sum."""
        return sum(stage.sent_bytes for stage in self.stages)

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
    replicas: Sequence[int] | None = None,
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
        replicas: how many devices each stage has, if that is given; by default one.
        training: scheme, optimizer slots, microbatches and recomputation, which decide on the memory.

    Raises:
        ValueError: fewer blocks than devices (without ``replicate``); no cut that fits the memory, naming the stage
            that is too large in the leanest one, and what would help.
    """
    cluster, training = cluster or Cluster(), training or DEFAULT_TRAINING
    blocks = len(profile.blocks)
    if replicate and replicas is not None:
        raise ValueError(f"Replicas are given or looked for. Received: replicate=True, {replicas=}. Try one of them.")
    counts = None if replicate else tuple(replicas or (1,) * num_devices)
    stages = 1 if counts is None else len(counts)
    whole = [num_devices, *(counts or ())]
    if any(isinstance(each, bool) or not isinstance(each, (int, np.integer)) or each < 1 for each in whole):
        raise ValueError(
            "Devices, and the replicas of each stage, are numbers from 1 up. "
            f"Received: num_devices={num_devices!r}, replicas={replicas!r}. Try num_devices=4."
        )
    if stages > blocks:
        raise ValueError(
            f"A chain of {blocks} blocks can be cut into 1 to {blocks} stages. Received: num_devices={num_devices}. "
            "Try fewer devices or a deeper model."
        )
    if counts is not None and sum(counts) != num_devices:
        raise ValueError(
            f"The replicas of all stages are the devices. Received: replicas={replicas!r}, num_devices={num_devices}. "
            f"Try num_devices={sum(counts)}."
        )
    costs = Costs(profile, cluster)
    if replicate and cluster.memory_bytes is None:  # more than work at once would only repeat the updates
        num_devices = int(min(num_devices, cluster.processors))
    problem = _problem(costs, num_devices, counts)
    found = fastest(problem)
    assert found is not None  # without a limit there is always a way
    slowest_s = max(problem.seconds[place].of(first, end) for first, end, place in found)
    best = _described(profile, costs, most_even(problem, slowest_s), training)
    if cluster.memory_bytes is None or _fullest(best) <= cluster.memory_bytes:
        return best
    return _within_memory(profile, costs, problem, training, slowest_s)


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
    return _described(profile, costs, choices, training or DEFAULT_TRAINING)


def _problem(costs: Costs, devices: int, replicas: Sequence[int] | None) -> Problem:
    """Where stages may be: anywhere, or side by side with so many replicas each."""
    places: list[list[Place]] = [[] for _ in range(devices)]
    if replicas is not None:
        for device, count in zip(accumulate([0, *replicas]), replicas, strict=False):
            places[device].append(Place(device, count, device + count))
    else:
        for device in range(devices):
            ends = ((count, costs.cluster.starts(device + count)) for count in range(1, devices - device + 1))
            places[device] += [Place(device, count, end) for count, afters in ends for end in afters if end <= devices]
    seconds = {place: costs.seconds(place) for each in places for place in each}
    return Problem(costs.blocks, devices, places, seconds, None if replicas is None else len(replicas))


def _within_memory(profile: Profile, costs: Costs, problem: Problem, training: Training, at_least: float) -> Partition:
    """The fastest partition whose stages fit; what a stage keeps depends on how many stages follow it.

    The first search takes every stage to keep what it would if the pipeline began with it. That is never more than
    it keeps: if the partition found fits even so, none is better. If not, every number of stages is tried.
    """
    limit = costs.cluster.memory_bytes
    assert limit is not None
    best = None
    totals = _totals(costs, problem)
    for total in totals:
        found = fastest(problem, _limit(costs, training, limit, total), at_least, best.slowest_s if best else HUGE)
        if found is None:
            continue
        candidate = _described(profile, costs, found, training)
        if total is None:
            at_least = candidate.slowest_s
            totals[1:] = sorted(totals[1:], key=lambda each: abs((each or 0) - len(found)))
        if _fullest(candidate) <= limit:
            best = candidate
            if best.slowest_s <= at_least * CLOSE:
                break
    if best is None:
        raise NoPlan(_what_would_fit(profile, costs, problem, training))
    return best


def _totals(costs: Costs, problem: Problem) -> list[int | None]:
    if problem.stages is not None:
        return [problem.stages]
    return [None, *range(1, min(problem.devices, costs.blocks) + 1)]


def _limit(costs: Costs, training: Training, limit_bytes: float, total: int | None) -> Limit:
    """What stages keep in a pipeline of ``total`` stages, or of those from each one to the end."""

    def memory(place: Place, left: int) -> Memory:
        stages = max(total or left, left)
        return costs.memory(place.replicas, demand(training, stages - left, stages))

    return Limit(memory, limit_bytes, total or NEVER)


def _leanest(profile: Profile, costs: Costs, problem: Problem, training: Training) -> Partition:
    """The partition whose fullest device holds least, to a thousandth."""
    anything = Reach(problem, HUGE).stages()
    assert anything is not None
    best = _described(profile, costs, anything, training)
    low, high = 0.0, float(_fullest(best))
    while high > 1.001 * low and high >= 1:
        limit_bytes = (low + high) / 2
        candidates = [
            _described(profile, costs, found, training)
            for total in _totals(costs, problem)
            if (found := Reach(problem, HUGE, _limit(costs, training, limit_bytes, total)).stages()) is not None
        ]
        fitting = [each for each in candidates if _fullest(each) <= limit_bytes]
        if fitting:
            best = min(fitting, key=_fullest)
            high = float(_fullest(best))
        else:
            low = limit_bytes
    return best


def _what_would_fit(profile: Profile, costs: Costs, problem: Problem, training: Training) -> str:
    limit = costs.cluster.memory_bytes
    assert limit is not None
    leanest = _leanest(profile, costs, problem, training)
    stage = max(leanest.stages, key=lambda each: each.memory_bytes)
    others = {
        "recompute=True": training._replace(recompute=True),
        "scheme='vanilla', which keeps no old weights": training._replace(scheme="vanilla"),
        "scheme='1f1b' with 8 microbatches": training._replace(scheme="1f1b", microbatches=8),
    }
    needs = {what: _fullest(_leanest(profile, costs, problem, other)) for what, other in others.items()}
    helps = [f"{what} ({mib(most)} MiB)" for what, most in needs.items() if most < 0.99 * stage.memory_bytes]
    return (
        f"No cut of {profile.model!r} fits the devices' memory: in the leanest one, stage "
        f"{leanest.stages.index(stage)} ({stage.first} - {stage.last}) keeps {mib(stage.memory_bytes)} MiB a device, "
        f"{mib(stage.memory_bytes - limit)} MiB too much. Received: memory_bytes={limit} ({mib(limit)} MiB), "
        f"devices={problem.devices}, scheme={training.scheme!r}. "
        f"Try {'; '.join([*helps, 'a smaller batch; or more devices'])}."
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
                total_s=costs.seconds(place).of(first, end),
                update_s=sum(block.update_s for block in part),
                replicas=place.replicas,
                device=place.device,
                sent_bytes=int(costs.sent_bytes(first, end, place.replicas)),
                memory_bytes=math.ceil(costs.memory(place.replicas, needs).of(first, end)),
            )
        )
    return Partition(profile.model, profile.batch_size, tuple(stages), training, costs.cluster.processors)
