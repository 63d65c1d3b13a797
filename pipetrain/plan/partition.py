"""Cut a chain of blocks into stages so that the slowest stage is as fast as possible and each fits its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.cost import Costs, Memory, Place
from pipetrain.plan.memory import Demand, Training, demand, even_demand
from pipetrain.plan.profile import Profile, mib
from pipetrain.plan.search import CLOSE, HUGE, Limit, Problem, Reach, StageChoice, fastest, most_even
from pipetrain.plan.stages import DEFAULT_TRAINING, Partition, described, located, predictions
from pipetrain.schemes.arguments import checked_count, is_count
from pipetrain.schemes.table import HORIZONS

Need = Callable[[Training, int, int], Demand]
Attempt = tuple[int | None, Need]
ENOUGH = 1.001  # the leanest cut is looked for to a thousandth


class NoPlan(ValueError):
    """No cut of the model fits the devices' memory."""


class Capacity:
    """What fits so many bytes a device.

    What a stage keeps depends on how many stages there are. A first search takes every stage to keep what it would if
    the pipeline began with it. That is never more than it keeps: if nothing fits, nothing does for any number of
    stages; if what is found fits even so, none is better. Else, every number of stages is tried. Where more stages need
    more microbatches, of which each keeps less, there is no such first search.
    """

    def __init__(self, profile: Profile, costs: Costs, problem: Problem, training: Training) -> None:
        self._profile, self._costs, self._problem, self._training = profile, costs, problem, training

    def fastest(self, limit_bytes: int, at_least_s: float) -> Partition:
        """The partition that fits whose slowest stage is fastest; ``at_least_s`` is a time that is known to be needed.

        Raises NoPlan, naming the stage that is too large in the leanest partition, and what would help.
        """
        best, slowest_s = None, HUGE
        attempts = self._attempts()
        for total, need in attempts:
            limit = self._limit(limit_bytes, total, need)
            found = fastest(self._problem, limit, at_least_s, slowest_s)
            if found is None:
                if total is None:
                    break
                continue
            candidate = described(self._profile, self._costs, found, self._training)
            if total is None:
                at_least_s = self._problem.slowest_s(found)
                _nearest_first(attempts, len(found))
            if candidate.fullest_bytes <= limit_bytes:
                best, slowest_s = candidate, self._problem.slowest_s(found)
                if slowest_s <= at_least_s * CLOSE:
                    break
        if best is None:
            best = self.leanest(limit_bytes)  # of a device's several stages, a looser limit may lead to what fits
            if best.fullest_bytes > limit_bytes:
                raise NoPlan(self._what_would_fit(limit_bytes, best))
        return best

    def any(self, limit_bytes: float) -> Partition | None:
        """Some partition that fits, however slow; None if there is none."""
        attempts = self._attempts()
        for total, need in attempts:
            found = Reach(self._problem, HUGE, self._limit(limit_bytes, total, need)).stages()
            if found is not None:
                candidate = described(self._profile, self._costs, found, self._training)
                if candidate.fullest_bytes <= limit_bytes:
                    return candidate
                if total is None:
                    _nearest_first(attempts, len(found))
            elif total is None:
                return None
        return None

    def leanest(self, at_least_bytes: float) -> Partition:
        """The partition whose fullest device holds least, to a thousandth; more than ``at_least_bytes``."""
        best = self.any(HUGE)
        assert best is not None  # without a limit there is always a way
        low = at_least_bytes
        while best.fullest_bytes > ENOUGH * low and best.fullest_bytes > low + 1:
            middle = (low + best.fullest_bytes) / 2
            leaner = self.any(middle)
            if leaner is None:
                low = middle
            else:
                best = leaner
        return best

    def _attempts(self) -> list[Attempt]:
        """For how many stages to search, None standing for any number, and what each is taken to keep.

        A device's several stages are taken to keep equal parts of what is there when they hold most together; then, as
        that refuses nothing but may not fit, each what it keeps at its own fullest.
        """
        if self._training.chosen.schedule.chunks > 1:
            return [(self._problem.stages, even_demand), (self._problem.stages, demand)]
        if self._problem.stages is not None:
            return [(self._problem.stages, demand)]
        totals = range(1, min(self._problem.devices, self._problem.blocks) + 1)
        varies = len({self._training.microbatches_of(total) for total in totals}) > 1
        return [(total, demand) for total in (*(() if varies else (None,)), *totals)]

    def _limit(self, limit_bytes: float, total: int | None, need: Need) -> Limit:
        """What stages keep in a pipeline of ``total`` stages, or of those from each one to the end."""

        def memory(place: Place, left: int) -> Memory:
            stages = total or left
            return self._costs.memory(place.replicas, need(self._training, stages - left, stages))

        # of a device's several stages each is given an equal part, which may refuse what would fit
        return Limit(memory, limit_bytes / self._training.chosen.schedule.chunks, total)

    def _what_would_fit(self, limit_bytes: int, leanest: Partition) -> str:
        together = max(leanest.on_devices, key=lambda stages: sum(stage.memory_bytes for stage in stages))
        keep = " and ".join(f"stage {leanest.stages.index(each)} ({each.first} - {each.last})" for each in together)
        horizon = getattr(self._training.scheme, "horizon", HORIZONS[0])
        plain = self._training._replace(scheme=str(self._training.scheme))
        others = {} if horizon == HORIZONS[0] else {"horizon='round-trip'": plain}
        others |= {
            "recompute=True": self._training._replace(recompute=True),
            "scheme='vanilla', which keeps no old weights": self._training.under("vanilla"),
            "scheme='1f1b' with 8 microbatches": self._training.under("1f1b")._replace(microbatches=8),
        }
        helps = [
            what
            for what, training in others.items()
            if self._training.chosen.schedule.chunks == training.chosen.schedule.chunks
            and Capacity(self._profile, self._costs, self._problem, training).any(limit_bytes)
        ]
        asked = "" if horizon == HORIZONS[0] else f", {horizon=}"
        return (
            f"No cut of {self._profile.model!r} fits the devices' memory: in the leanest one, {keep} "
            f"keep{'s' * (len(together) == 1)} {mib(leanest.fullest_bytes)} MiB a device, "
            f"{mib(leanest.fullest_bytes - limit_bytes)} MiB too much. Received: memory_bytes={limit_bytes} "
            f"({mib(limit_bytes)} MiB), devices={self._problem.devices // self._training.chosen.schedule.chunks}, "
            f"scheme={str(self._training.scheme)!r}{asked}. "
            f"Try {'; '.join([*helps, 'a smaller batch; or more devices'])}."
        )


def _nearest_first(attempts: list[Attempt], stages: int) -> None:
    """All but the first in the order of how near they are to this number of stages."""
    attempts[1:] = sorted(attempts[1:], key=lambda attempt: abs((attempt[0] or 0) - stages))


DEVICES = "Devices, and the replicas of each stage, are numbers from 1 up"


def partition(
    profile: Profile,
    num_devices: int,
    cluster: Cluster | None = None,
    *,
    replicate: bool = False,
    replicas: Sequence[int] | None = None,
    training: Training | None = None,
) -> Partition:
    """Cut the profiled chain into ``num_devices`` stages, one a device, or into replicated stages.

    A schedule with several stages a device gets as many times more stages, on the devices that its ``place`` gives.

    Minimises the slowest stage, its transfers included, by dynamic programming over
    ``T(i, a) = min over j, r, b of max(cost[i, j, r, a], T(j, b))`` (PipeDream, arXiv 1806.03377, section 3.3), where
    the next stage's first device b is a + r or the first of a later group of devices; among the cuts that reach this
    optimum, the one whose stages are most even (least sum of squared seconds), if that fits the devices' memory. Each
    stage has the faster kernels, compiled ones only if they are clearly faster: they count 5% more, and the
    profile's spread on top. Predicting weights counts where the number of stages is given.

    Args:
        profile: what the blocks cost.
        num_devices: how many devices there are.
        cluster: how they are joined and how much memory they have; by default PCIe 3.0 and unlimited memory.
        replicate: let a stage have several devices, each of which does its share of every minibatch's rows, and
            leave devices unused where they would not help.
        replicas: how many devices each stage has; by default one.
        training: scheme, optimizer slots, microbatches and recomputation, which determine the memory.

    Raises:
        ValueError: for what is no number of devices, or no training that can be planned; fewer blocks than devices
            (without ``replicate``); no cut that fits the memory, with the stage that is too large in the cut with the
            least memory, and a suggestion.
    """
    cluster, training = cluster or Cluster(), checked_training(training)
    num_devices, replicas = checked_count("num_devices", num_devices, DEVICES, 4), _checked_replicas(replicas)
    blocks = len(profile.blocks)
    if replicate and replicas is not None:
        raise ValueError(f"Replicas are given or looked for. Received: replicate=True, {replicas=}. Try one of them.")
    schedule = training.chosen.schedule
    chunks = schedule.chunks
    if chunks > 1 and (replicate or {*(replicas or [1])} != {1}):
        raise ValueError(
            f"A schedule of {chunks} stages a device has no replicas. Received: {replicate=}, {replicas=}. "
            "Try without them, or a schedule of one stage a device."
        )
    if chunks > 1:  # cut as for a device each, and placed as the schedule says
        num_devices, replicas = num_devices * chunks, None
    counts = None if replicate else tuple(replicas or (1,) * num_devices)
    stages = 1 if counts is None else len(counts)
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
    kernels = training.kernels(stages if counts else num_devices)
    costs = costs_of(profile, cluster, training, kernels)
    if replicate and cluster.memory_bytes is None:  # more than work at once would only repeat the updates
        num_devices = int(min(num_devices, cluster.processors))
    problem = _problem(costs, num_devices, counts, training)
    found = fastest(problem)
    assert found is not None  # without a limit there is always a way
    slowest_s = problem.slowest_s(found)
    best = described(profile, costs, most_even(problem, slowest_s), training)
    if cluster.memory_bytes is None or cluster.holds(best.fullest_bytes):
        return best
    return Capacity(profile, costs, problem, training).fastest(cluster.memory_bytes, slowest_s)


def costs_of(profile: Profile, cluster: Cluster, training: Training, kernels: bool | str) -> Costs:
    """What stages cost where the model is trained so."""
    chosen = training.chosen
    sent = chosen.compression, chosen.replica_compression
    return Costs(profile, cluster, training.microbatches, kernels, *sent)


def plan(
    profile: Profile,
    ends: Sequence[int],
    cluster: Cluster | None = None,
    replicas: Sequence[int] | None = None,
    training: Training | None = None,
    compiled: Sequence[bool] | None = None,
) -> Partition:
    """The partition whose stage n ends before block ``ends[n]`` and has ``replicas[n]`` devices, one after another.

    ``compiled`` says which stages XLA compiles; by default that is chosen as ``training.kernels`` says.
    """
    training = checked_training(training)
    kernels = training.kernels(len(ends)) if compiled is None else True
    costs = costs_of(profile, cluster or Cluster(), training, kernels)
    counts = replicas or [1] * len(ends)
    choices, first, device = [], 0, 0
    for end, count in zip(ends, counts, strict=True):
        choices.append(StageChoice(first, end, Place(device, count, device + count)))
        first, device = end, device + count
    return described(profile, costs, choices, training, compiled)


def everywhere(profile: Profile, num_devices: int, cluster: Cluster, training: Training) -> Partition:
    """The whole model on every device, of one or several, whether it fits their memory or not.

    Its minibatches have no microbatches; XLA compiles it on one device alone, as ``single`` is and ``data-parallel``
    is not.
    """
    way = training.under("single")._replace(microbatches=1)
    if num_devices > 1:
        way = way._replace(jit_compile=False)
    return plan(profile, [len(profile.blocks)], cluster, [num_devices], way)


def checked_training(training: Training | None) -> Training:
    """The training to plan for, by default the usual one. Raises ValueError for what is none, or has no stages."""
    if training is None:
        return DEFAULT_TRAINING
    if not isinstance(training, Training):
        raise ValueError(
            f"What is planned for is a Training. Received: training={training!r}. Try training=Training('spectrain')."
        )
    checked_count("training.microbatches", training.microbatches, "A batch has at least one microbatch", 4)
    checked_count("training.slots", training.slots, "An optimizer has no variables for a weight, or more", 1, least=0)
    if not isinstance(training.jit_compile, bool) and training.jit_compile != "auto":
        raise ValueError(
            f"XLA compiles stages, or does not, or where it is faster. Received: training.jit_compile="
            f"{training.jit_compile!r}. Try True, False or 'auto'."
        )
    training.chosen.check()  # refuses what is no scheme of stages
    return training


def _checked_replicas(replicas: Any) -> tuple[int, ...] | None:
    if replicas is None:
        return None
    if isinstance(replicas, str) or not isinstance(replicas, Sequence) or not all(map(is_count, replicas)):
        raise ValueError(f"{DEVICES}. Received: replicas={replicas!r}. Try replicas=(2, 1).")
    return tuple(map(int, replicas)) or None


def _problem(costs: Costs, devices: int, replicas: Sequence[int] | None, training: Training) -> Problem:
    """Where stages may be: anywhere, or side by side with so many replicas each; and with which kernels.

    Of a schedule that gives devices several stages, each stage counts as a device; what it costs, it does where it is.
    Where their number is looked for, weights are not predicted: how often that is depends on it.
    """
    places: list[list[Place]] = [[] for _ in range(devices)]
    if replicas is not None:
        for n, (device, count) in enumerate(zip(accumulate([0, *replicas]), replicas, strict=False)):
            often = predictions(training, n, len(replicas))
            places[device] += costs.ways(Place(device, count, device + count, predictions=often))
    else:
        for device in range(devices):
            ends = ((count, costs.cluster.starts(device + count)) for count in range(1, devices - device + 1))
            for count, after in ((count, end) for count, afters in ends for end in afters if end <= devices):
                places[device] += costs.ways(Place(device, count, after))
    schedule = training.chosen.schedule
    seconds = {place: costs.compared(located(place, schedule, devices)) for each in places for place in each}
    return Problem(costs.blocks, devices, places, seconds, None if replicas is None else len(replicas))
