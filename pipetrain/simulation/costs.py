"""The links of a cluster while transfers are under way: what each has to wait for, and when it arrives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.cost import PREDICTING
from pipetrain.plan.profile import Profile
from pipetrain.plan.stages import StagePlan
from pipetrain.schemes.actions import OPERATIONS, Action, Operation
from pipetrain.schemes.schedules import has_halves, joined
from pipetrain.schemes.scheme import Scheme


class Route(NamedTuple):
    """The way from one device to another, and the media that a transfer has to itself while it lasts."""

    bandwidth_bytes_per_s: float
    latency_s: float
    media: tuple[int, ...]


class Network:
    """Transfers over shared media, each of which serves one at a time, first come, first served.

    A transfer begins when all its media are free, holds them for ``bytes / bandwidth``, and arrives ``latency`` later.
    Ask for transfers in the order of time.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers: dict[Hashable, int] = {}
        self.free_at: list[float] = []

    def route(self, sender: int, receiver: int) -> Route:
        """The way between two devices: a link of their own, two ports, or a bus, as their level says."""
        levels = self._cluster.levels
        depth = self._cluster.depth(min(sender, receiver), max(sender, receiver))
        link = self._cluster.link(min(sender, receiver), max(sender, receiver))
        devices, contention = levels[depth].devices, levels[depth].contention
        if contention == "bus":
            media = [self.medium("bus", depth, 0 if devices == math.inf else sender // devices)]
        elif contention == "port":
            member = levels[depth - 1].devices if depth else 1
            media = [self.medium("out", depth, sender // member), self.medium("in", depth, receiver // member)]
        else:
            media = [self.medium("link", sender, receiver)]
        return Route(link.bandwidth_bytes_per_s, link.latency_s, tuple(media))

    def medium(self, *key: Hashable) -> int:
        """The number of the medium of this name; a new one's if there is none yet."""
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self.free_at):
            self.free_at.append(0.0)
        return number

    def send(self, route: Route, size_bytes: float, now: float) -> float:
        """Begin a transfer as soon as can be; returns when it arrives."""
        start_s = max(now, *(self.free_at[medium] for medium in route.media))
        end_s = start_s + size_bytes / route.bandwidth_bytes_per_s
        for medium in route.media:
            self.free_at[medium] = end_s
        return end_s + route.latency_s

    def reduce(self, devices: Sequence[int], size_bytes: float, now: float) -> float:
        """Sum as many bytes of each device in a ring; returns when all have the sums.

        In each of ``2 * (r-1)`` steps every device sends an r-th to the next. Without contention this takes
        ``Link.reduce_seconds``.
        """
        count = len(devices)
        ring = [self.route(devices[n], devices[(n + 1) % count]) for n in range(count)]
        step_s: Counter[int] = Counter()
        for route in ring:
            for medium in route.media:
                step_s[medium] += size_bytes / count / route.bandwidth_bytes_per_s  # type: ignore[assignment]
        start_s = max(now, *(self.free_at[medium] for medium in step_s))
        longest_s = max(step_s.values()) + max(route.latency_s for route in ring)
        end_s = start_s + 2 * (count - 1) * longest_s
        for medium in step_s:
            self.free_at[medium] = end_s
        return end_s


ACTION_S = 5e-5  # what an action takes at least beside its computing, see docs/benchmarks/overhead.md
THREAD_ACTION_S = 3e-4  # and one of a device's thread, as GPUs have
ADDING = 0.6  # of an update: adding gradients reads two and writes one where SGD with momentum reads three, writes two


def acting(cluster: Cluster) -> Cluster:
    """The cluster, whose actions take ``ACTION_S`` each beside their computing, or what it says if that is more."""
    return replace(cluster, overhead_s=max(cluster.overhead_s, ACTION_S))


def between_steps_s(profile: Profile, cluster: Cluster) -> float:
    """Seconds between two steps where a step is one call of all devices: the caller's, the call's, and an action's."""
    return profile.metric_s + cluster.overhead_s + cluster.call_s


class Adding(NamedTuple):
    """Whether an action adds weight gradients to those of another microbatch, and whether both are made in one call."""

    adds: bool = False
    in_one_call: bool = False


def additions(actions: Sequence[Action], microbatches: int) -> dict[tuple[str, int, int], Adding]:
    """What those of a device's actions add that make weight gradients of its first minibatch; later ones do the same.

    By operation, stage and microbatch.
    """
    begun: set[int] = set()
    found: dict[tuple[str, int, int], Adding] = {}
    for call in joined((action for action in actions if action.microbatch < microbatches), microbatches):
        for n, action in enumerate(call):
            if action.updates:
                found[action] = Adding(action.stage in begun, n > 0)
                begun.add(action.stage)
    return found


class StageCosts:
    """Seconds of the stages' operations and updates.

    Args:
        stages: what they cost, for a whole minibatch.
        batch_size: rows of a minibatch.
        scheme: which says where weights are predicted.
        microbatches: of a minibatch.
        overhead_s: what every action takes beside its computing, on a device of any speed.
    """

    def __init__(
        self, stages: Sequence[StagePlan], batch_size: int, scheme: Scheme, microbatches: int, overhead_s: float
    ) -> None:
        self._overhead_s = overhead_s
        self._stages, self._batch_size, self._scheme, self._microbatches = stages, batch_size, scheme, microbatches
        schedule = scheme.schedule
        self._halved = has_halves(schedule.order, schedule.devices(len(stages)), microbatches)

    def compute_s(self, stage: int, op: str, rows: int, adding: Adding, speed: float) -> float:
        """Seconds of an operation on so many rows."""
        operation, plan = OPERATIONS[op], self._stages[stage]
        early_s, late_s = plan.backward_s - plan.late_s, plan.late_s
        if self._products_once(stage):
            late_s -= plan.product_s
        whole_s = operation.forward * plan.forward_s + operation.early * early_s + operation.late * late_s
        often = dict(zip(("forward", "backward"), self._predictions(stage), strict=True))
        predicting_s = sum(PREDICTING * plan.update_s / speed * often[way] for way in operation.reads)
        predicting_s += self._coding_s(stage, operation, rows / self._batch_size) / speed
        once = adding.in_one_call or self._products_once(stage)
        adding_s = ADDING * plan.update_s * self._summed(stage, once) / speed if adding.adds else 0.0
        return self._overhead_s + (whole_s * rows / self._batch_size / speed + adding_s + predicting_s)

    def _coding_s(self, stage: int, operation: Operation, part: float) -> float:
        """Seconds to decode what comes to an operation, and to encode what it makes, of such a part of the rows."""
        if self._scheme.compression is None:
            return 0.0
        before = self._stages[stage - 1].coding_s if stage else (0.0, 0.0)
        after = self._stages[stage].coding_s  # none of the last one
        return part * (operation.forward * (before[1] + after[0]) + operation.early * (after[1] + before[0]))

    def update_s(self, stage: int) -> float:
        """Seconds of a stage's update, with the weight gradients that are made or sent to other stages only then."""
        plan = self._stages[stage]
        messages_s = plan.messages_s if self._scheme.replica_compression is not None else 0.0
        late_s = plan.product_s if self._products_once(stage) else 0.0
        return plan.update_s + plan.step_s + plan.summing_s + messages_s + late_s

    def _products_once(self, stage: int) -> bool:
        """Whether weight gradients that are products over rows wait for the minibatch's last microbatch.

        In halves of backwards each call makes its own.
        """
        plan = self._stages[stage]
        return self._microbatches > 1 and plan.replicas == 1 and not self._halved

    def _summed(self, stage: int, once: bool) -> float:
        """The part of a stage's weights whose gradients are added; ``once``: those that are products are not."""
        plan = self._stages[stage]
        return 1 - plan.product_bytes / plan.weight_bytes if plan.product_bytes and once else 1.0

    def _predictions(self, stage: int) -> tuple[float, float]:
        """How many times a forward and a backward of the stage predict weights."""
        forwards, backwards = self._scheme.predictions(stage, len(self._stages), self._microbatches)
        return forwards / self._microbatches, backwards / self._microbatches
