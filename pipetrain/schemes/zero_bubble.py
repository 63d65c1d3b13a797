"""Synchronous schedules whose backward is in halves, so that weight gradients are made while a device would wait.

p is the number of devices, m that of microbatches of a minibatch. In a V, device d of p has the stages d and
2p-1-d, so the first has the loss too.

ZB-H1 with four devices and six microbatches, one column a unit of time::

    0: F0  F1  F2  F3  .   .   .   I0  W0  F4  I1  W1  F5  I2  W2  I3  W3  I4  W4  I5  W5
    1: .   F0  F1  F2  .   .   I0  F3  I1  W0  F4  I2  W1  F5  I3  W2  I4  W3  I5  W4  W5
    2: .   .   F0  F1  .   I0  F2  I1  F3  I2  W0  F4  I3  W1  F5  I4  W2  I5  W3  W4  W5
    3: .   .   .   F0  I0  F1  I1  F2  I2  F3  I3  W0  F4  I4  W1  F5  I5  W2  W3  W4  W5

ZB-H2 with seven: a device makes more forwards before its first backward, and waits no more once it has begun::

    0: F0  F1  F2  F3  F4  F5  F6  I0  W0  I1  W1  I2  W2  I3  W3  I4  W4  I5  W5  I6  W6  .   .   .
    1: .   F0  F1  F2  F3  F4  I0  F5  I1  F6  I2  W0  I3  W1  I4  W2  I5  W3  I6  W4  W5  W6  .   .
    2: .   .   F0  F1  F2  I0  F3  I1  F4  I2  F5  I3  F6  I4  W0  I5  W1  I6  W2  W3  W4  W5  W6  .
    3: .   .   .   F0  I0  F1  I1  F2  I2  F3  I3  F4  I4  F5  I5  F6  I6  W0  W1  W2  W3  W4  W5  W6

Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2. Bubbles are those of T_F = T_I =
T_W: the time in which a device waits from its first action to its last one, as a part of that in which it works. A
device that is done goes on with the next minibatch without waiting for the others, if that is there: each stage's
update depends on its own gradients alone, and so is exact without being validated or undone afterwards, except where
gradients are clipped by their global norm or losses are scaled, for which all stages wait for each other.

ZB-V with two devices, four stages and three microbatches, one column a unit of time::

    0: 0F0  0F1  0F2  3F0  3I0  3W0  3F1  3I1  3W1  0I0  0W0  3F2  3I2  0I1  3W2  0I2  0W1  0W2  .
    1: .    1F0  2F0  1F1  2F1  2I0  2W0  1F2  1I0  1W0  2F2  2I1  1I1  2I2  1I2  2W1  1W1  2W2  1W2

V-Half with the same::

    0: 0F0  .    .    3F0  3I0  0F1  3W0  .    3F1  3I1  0F2  0I0  3W1  0W0  3F2  3I2  0I1  3W2  0I2  0W1  0W2
    1: .    1F0  2F0  .    .    2I0  1F1  2F1  1I0  2W0  2I1  1F2  1W0  2F2  1I1  2W1  2I2  1I2  1W1  2W2  1W2

V-Min with the same::

    0: 0F0  .    .    3F0  3I0  0F1  3W0  0I0  0W0  3F1  3I1  0F2  3W1  0I1  0W1  3F2  3I2  3W2  .    0I2  0W2
    1: .    1F0  2F0  .    .    2I0  1I0  1F1  2F1  2W0  1W0  2I1  1I1  1F2  2F2  2W1  1W1  2I2  1I2  2W2  1W2

Their activations are in those of a device's two stages for one microbatch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from pipetrain.schemes.actions import Action, Op
from pipetrain.schemes.dry_run import Made, missing, stepped
from pipetrain.schemes.schedules import Groups, Order, Schedule

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
    devices = [_PlannedDevice(order, plan.limit, stages) for order in plan.orders]
    for _ in stepped(devices):
        pass
    if any(device.left for device in devices):
        raise RuntimeError(f"No device goes on, each of which holds at most {plan.limit} microbatches.")
    return [device.order for device in devices]


class _PlannedDevice:
    """A device that executes its plan, and what it holds."""

    def __init__(self, planned: Sequence[Action], limit: int, stages: int) -> None:
        self._planned, self._limit, self._stages, self._held = deque(planned), limit, stages, 0
        self._operands: deque[Action] = deque()  # the I whose W is not made yet
        self.order: list[Action] = []

    @property
    def left(self) -> int:
        """How many actions are left, as far as is known."""
        return len(self._planned) + len(self._operands)

    def next(self, made: Made) -> Action | None:
        """What it does in this unit of time; None if it waits."""
        action = self._planned[0] if self._planned else None
        is_free = action is not None and (action.op != "F" or self._held < self._limit)
        if action is not None and is_free and not missing(action, self._stages, made):
            self._planned.popleft()
            self._held += action.op == "F"
            if action.op == "I":
                self._operands.append(action)
        elif self._operands:
            action = self._operands.popleft()._replace(op="W")
            self._held -= 1
        else:
            return None
        self.order.append(action)
        return action


def _h1(devices: int, microbatches: int) -> Orders:
    return with_weight_gradients(_planned(devices, microbatches, 1, devices))


def _h2(devices: int, microbatches: int) -> Orders:
    return with_weight_gradients(_planned(devices, microbatches, 2, 2 * devices - 1))


ZB_H1 = Schedule(made_whole(_h1))  # bubble (p-1)/(3m), at most p activations held, as 1F1B
ZB_H2 = Schedule(made_whole(_h2))  # bubble 0 for m from 2p-1 up, at most 2p-1 activations held


def _planned(devices: int, microbatches: int, times: int, limit: int) -> SchedulePlan:
    """``times (p-1-k)`` forwards of warm-up at device k, then a forward and an input gradient in turn."""
    orders = [[*_one_by_one(device, microbatches, times * (devices - 1 - device))] for device in range(devices)]
    return SchedulePlan(orders, limit)


def _one_by_one(device: int, microbatches: int, warm_up: int) -> Iterator[Action]:
    for n in range(microbatches + warm_up):
        if n < microbatches:
            yield Action("F", device, n)
        if warm_up <= n:
            yield Action("I", device, n - warm_up)


INTERVAL = 6  # units of time in which a device does all of one microbatch: F, I and W of two stages


def v_shape(stage: int, devices: int) -> int:
    """The device of a virtual stage: down to the last device, and up again."""
    return min(stage, 2 * devices - 1 - stage)


class Delays(NamedTuple):
    """Units of time from a stage's action to the next stage's, on each of a microbatch's four ways through the devices.

    Forwards go down to the last device and up to the first one, input gradients down and up again.
    """

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int


def _zb_v(devices: int, microbatches: int) -> Orders:
    orders = [[*_zb_v_planned(device, devices, microbatches)] for device in range(devices)]
    return with_weight_gradients(SchedulePlan(orders, 2 * devices))


def _v_half(devices: int, microbatches: int) -> Orders:
    return with_weight_gradients(_repeated(devices, microbatches, Delays(1, 2, 1, 2), 2 * ((devices + 2) // 2)))


def _v_min(devices: int, microbatches: int) -> Orders:
    return with_weight_gradients(_repeated(devices, microbatches, Delays(1, 1, 1, 1), 2 * ((devices + 4) // 3)))


# Qi et al. 2023 (arXiv 2401.10241), section 6: bubble 0 for m from 2p-1 up, p activations, as 1F1B.
ZB_V = Schedule(made_whole(_zb_v), chunks=2, place=v_shape)
# Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), section 3: bubble about p/(2m),
# (p+2)//2 activations.
V_HALF = Schedule(made_whole(_v_half), chunks=2, place=v_shape)
# The same: bubble about 2p/(3m), (p+4)//3 activations.
V_MIN = Schedule(made_whole(_v_min), chunks=2, place=v_shape)


def _zb_v_planned(device: int, devices: int, microbatches: int) -> Iterator[Action]:
    """Forwards of the first stage until those of the second one arrive, then of both, then all in turn."""
    first, second = device, 2 * devices - 1 - device
    begun: Counter[tuple[Op, int]] = Counter()

    def once(op: Op, stage: int) -> Iterator[Action]:
        if begun[op, stage] < microbatches:
            yield Action(op, stage, begun[op, stage])
            begun[op, stage] += 1

    parts: list[tuple[int, tuple[tuple[Op, int], ...]]] = [
        (2 * (devices - device) - 1, (("F", first),)),
        (device, (("F", second), ("F", first))),
        (devices - device, (("F", second), ("I", second))),
        (microbatches, (("F", first), ("I", first), ("F", second), ("I", second))),
    ]
    for times, together in parts:
        for _ in range(times):
            for op, stage in together:
                yield from once(op, stage)


def _repeated(devices: int, microbatches: int, delays: Delays, limit: int) -> SchedulePlan:
    """One microbatch's times, repeated every ``INTERVAL`` units for the next ones: a building block of the source."""
    times = _block(devices, delays)
    ops: tuple[Op, ...] = ("F", "F", "I", "I")
    orders = []
    for device, own in enumerate(times):
        first, second = device, 2 * devices - 1 - device
        timed = [
            (at + INTERVAL * microbatch, Action(op, stage, microbatch))
            for microbatch in range(microbatches)
            for at, op, stage in zip(own, ops, (first, second, second, first), strict=True)
        ]
        orders.append([action for _, action in sorted(timed)])
    return SchedulePlan(orders, limit)


def _block(devices: int, delays: Delays) -> list[tuple[int, ...]]:
    """When each device does F of its first stage, F of its second one, and I of the second and of the first one.

    No two of these are in the same unit of the interval, or the next microbatch's would be in the way. Where a
    microbatch turns, at the last and the first device, it waits for as long as that takes.
    """
    turns = sorted(product(range(1, INTERVAL + 1), repeat=3), key=sum)
    blocks = (_times(devices, delays, each) for each in turns)
    return next(block for block in blocks if all(len({at % INTERVAL for at in own}) == len(own) for own in block))


def _times(devices: int, delays: Delays, turns: Sequence[int]) -> list[tuple[int, ...]]:
    last = devices - 1
    forward = [delays.forward_down * d for d in range(devices)]
    again = [forward[last] + turns[0] + delays.forward_up * (last - d) for d in range(devices)]
    back = [again[0] + turns[1] + delays.backward_down * d for d in range(devices)]
    ends = [back[last] + turns[2] + delays.backward_up * (last - d) for d in range(devices)]
    return [*zip(forward, again, back, ends, strict=True)]
