"""1F1B with the backward in halves, whose weight gradients are made while a device would wait.

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
"""

from __future__ import annotations

from collections.abc import Iterator

from pipetrain.schemes.actions import Action
from pipetrain.schemes.families.whole import Orders, SchedulePlan, made_whole, with_weight_gradients
from pipetrain.schemes.schedules import Schedule


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
