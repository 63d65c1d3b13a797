"""How long a device takes for the operations of a stage, and what actions cost beside their computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.cost import PREDICTING
from pipetrain.plan.profile import Profile
from pipetrain.plan.stages import StagePlan
from pipetrain.schemes.actions import OPERATIONS, Action
from pipetrain.schemes.schedules import has_halves, joined
from pipetrain.schemes.scheme import Scheme

ACTION_S = 5e-5  # what an action takes at least beside its computing, see docs/benchmarks/overhead.md
THREAD_ACTION_S = 3e-4  # and one of a device's thread, as GPUs have
ADDING = 0.6  # of an update: adding gradients reads two and writes one where SGD with momentum reads three, writes two


def acting(cluster: Cluster) -> Cluster:
    """The cluster, whose actions take ``ACTION_S`` each beside their computing, or what it says if that is more."""
    return replace(cluster, overhead_s=max(cluster.overhead_s, ACTION_S))


def between_steps_s(profile: Profile, cluster: Cluster) -> float:
    """Seconds between two steps where a step is one call of every device: the caller's, and what an action takes."""
    return profile.metric_s + cluster.overhead_s


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
        once = adding.in_one_call or self._products_once(stage)
        adding_s = ADDING * plan.update_s * self._summed(stage, once) / speed if adding.adds else 0.0
        return self._overhead_s + (whole_s * rows / self._batch_size / speed + adding_s + predicting_s)

    def update_s(self, stage: int) -> float:
        """Seconds of a stage's update, with the weight gradients that are made or sent to other stages only then."""
        plan = self._stages[stage]
        return plan.update_s + plan.summing_s + (plan.product_s if self._products_once(stage) else 0.0)

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
