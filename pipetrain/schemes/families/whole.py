"""Orders that are made for all devices together, a minibatch at a time, and where weight gradients stand in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from pipetrain.schemes.actions import Action
from pipetrain.schemes.dry_run import Made, missing
from pipetrain.schemes.schedules import Groups, Order

Orders = Sequence[Sequence[Action]]  # of every device


class SchedulePlan(NamedTuple):
    """Every device's forwards and input gradients in order, and how many microbatches' values each may hold."""

    orders: Orders
    limit: int


def made_whole(make: Callable[[int, int], Orders]) -> Order:
    """The order whose actions ``make(devices, microbatches)`` gives for all devices, for one minibatch."""
    made = lru_cache(maxsize=64)(make)

    def order(device: int, devices: int, groups: Groups) -> Iterator[Action]:
        for group in groups:
            for op, stage, microbatch in made(devices, len(group))[device]:
                yield Action(op, stage, group[microbatch])

    return order


def with_weight_gradients(plan: SchedulePlan) -> Orders:
    """The plan with a W for every I, in the order of the input gradients.

    A device makes weight gradients while it waits for something else, all actions taking one unit of time: a W when its
    next F or I cannot begin yet, or when an F would make it hold more than the limit; those that are left come last. W,
    not I, frees what a microbatch holds (arXiv 2405.15362, section 2). The limit is at least as many as the plan has
    between F and I.
    """
    stages = 1 + max(action.stage for order in plan.orders for action in order)
    devices = [_PlannedDevice(order, plan.limit) for order in plan.orders]
    made: Made = set()
    while any(device.left or device.operands for device in devices):
        step = [device.next(stages, made) for device in devices]
        if not any(step):
            raise RuntimeError(f"No device goes on, each of which holds at most {plan.limit} microbatches.")
        for action in filter(None, step):
            made.update((value, action.stage, action.microbatch) for value in action.operation.makes)
    return [device.order for device in devices]


class _PlannedDevice:
    """A device that executes its plan, and what it holds."""

    def __init__(self, planned: Sequence[Action], limit: int) -> None:
        self.left, self._limit, self._held = deque(planned), limit, 0
        self.operands: deque[Action] = deque()  # the I whose W is not made yet
        self.order: list[Action] = []

    def next(self, stages: int, made: Made) -> Action | None:
        """What it does in this unit of time; None if it waits."""
        action = self.left[0] if self.left else None
        if action is not None and not missing(action, stages, made) and (action.op != "F" or self._held < self._limit):
            self.left.popleft()
            self._held += action.op == "F"
            if action.op == "I":
                self.operands.append(action)
        elif self.operands:
            action = self.operands.popleft()._replace(op="W")
            self._held -= 1
        else:
            return None
        self.order.append(action)
        return action
