"""How long a device takes for the operations of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.plan.cost import PREDICTING
from pipetrain.plan.stages import StagePlan
from pipetrain.schemes.actions import OPERATIONS
from pipetrain.schemes.schedules import has_halves
from pipetrain.schemes.scheme import Scheme

ADDING = 0.6  # of an update: adding gradients reads two and writes one where SGD with momentum reads three, writes two


class StageCosts:
    """Seconds of the stages' operations and updates, without what every action takes in addition.

    Args:
        stages: what they cost, for a whole minibatch.
        batch_size: rows of a minibatch.
        scheme: which says where weights are predicted.
        microbatches: of a minibatch.
    """

    def __init__(self, stages: Sequence[StagePlan], batch_size: int, scheme: Scheme, microbatches: int) -> None:
        self._stages, self._batch_size, self._scheme, self._microbatches = stages, batch_size, scheme, microbatches
        schedule = scheme.schedule
        self._halved = has_halves(schedule.order, schedule.devices(len(stages)), microbatches)

    def compute_s(self, stage: int, op: str, rows: int, adds: bool, speed: float) -> float:
        """Seconds of an operation on so many rows; ``adds``: its weight gradients to those of a microbatch before."""
        operation, plan = OPERATIONS[op], self._stages[stage]
        early_s, late_s = plan.backward_s - plan.late_s, plan.late_s
        if self._products_once(stage):
            late_s -= plan.product_s
        whole_s = operation.forward * plan.forward_s + operation.early * early_s + operation.late * late_s
        often = dict(zip(("forward", "backward"), self._predictions(stage), strict=True))
        predicting_s = sum(PREDICTING * plan.update_s / speed * often[way] for way in operation.reads)
        added_s = ADDING * plan.update_s * self._summed(stage) / speed
        adding_s = added_s if adds and "weight gradients" in operation.makes else 0.0
        return whole_s * rows / self._batch_size / speed + adding_s + predicting_s

    def update_s(self, stage: int) -> float:
        """Seconds of a stage's update, with the weight gradients that are made or sent to other stages only then."""
        plan = self._stages[stage]
        return plan.update_s + plan.summing_s + (plan.product_s if self._products_once(stage) else 0.0)

    def _products_once(self, stage: int) -> bool:
        """Whether weight gradients that are products over rows wait for the minibatch's last microbatch.

        In halves of backwards each W makes its own.
        """
        plan = self._stages[stage]
        return self._microbatches > 1 and plan.replicas == 1 and not self._halved

    def _summed(self, stage: int) -> float:
        """The part of a stage's weights whose gradients are added microbatch by microbatch."""
        plan = self._stages[stage]
        return 1 - plan.product_bytes / plan.weight_bytes if plan.product_bytes and self._products_once(stage) else 1.0

    def _predictions(self, stage: int) -> tuple[float, float]:
        """How many times a forward and a backward of the stage predict weights."""
        forwards, backwards = self._scheme.predictions(stage, len(self._stages), self._microbatches)
        return forwards / self._microbatches, backwards / self._microbatches
