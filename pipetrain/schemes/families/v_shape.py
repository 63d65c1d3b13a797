"""Schedules in the shape of a V: device d of p has the stages d and 2p-1-d, so the first has the loss too.

ZB-V with two devices, four stages and three microbatches, one column a unit of time::

    0: 0F0  0F1  0F2  3F0  3I0  3W0  3F1  3I1  3W1  0I0  0W0  3F2  3I2  0I1  3W2  0I2  0W1  0W2  .
    1: .    1F0  2F0  1F1  2F1  2I0  2W0  1F2  1I0  1W0  2F2  2I1  1I1  2I2  1I2  2W1  1W1  2W2  1W2

V-Half with the same::

    0: 0F0  .    .    3F0  3I0  0F1  3W0  .    3F1  3I1  0F2  0I0  3W1  0W0  3F2  3I2  0I1  3W2  0I2  0W1  0W2
    1: .    1F0  2F0  .    .    2I0  1F1  2F1  1I0  2W0  2I1  1F2  1W0  2F2  1I1  2W1  2I2  1I2  1W1  2W2  1W2

V-Min with the same::

    0: 0F0  .    .    3F0  3I0  0F1  3W0  0I0  0W0  3F1  3I1  0F2  3W1  0I1  0W1  3F2  3I2  3W2  .    0I2  0W2
    1: .    1F0  2F0  .    .    2I0  1I0  1F1  2F1  2W0  1W0  2I1  1I1  1F2  2F2  2W1  1W1  2I2  1I2  2W2  1W2

Bubbles are as in ``zero_bubble``, activations in those of a device's two stages for one microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from pipetrain.schemes.actions import Action, Op
from pipetrain.schemes.families.whole import Orders, SchedulePlan, made_whole, with_weight_gradients
from pipetrain.schemes.schedules import Schedule

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
