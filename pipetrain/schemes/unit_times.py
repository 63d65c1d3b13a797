"""What orders are worth before anything is measured: their times where F, I and W take one unit each, and transfers 0.

These are the units in which papers state bubbles; a whole backward takes two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipetrain.schemes.actions import Action, held
from pipetrain.schemes.dry_run import Made, missing

UNITS = {"F": 1, "I": 1, "W": 1, "B": 2, "FB": 3, "FI": 2}


class Figures(NamedTuple):
    """Of orders that begin and end with an empty pipeline.

    ``bubble``: the units in which a device waits from its first action to its last one, as a part of the units of work
    of the busiest device, most of all devices. ``makespan`` are the units from the first action of all to the last one.
    ``peak_held`` are the most activations of a stage, of one microbatch each, that a device holds; W frees them, or B.
    """

    bubble: float
    makespan: int
    peak_held: list[int]


def figures(orders: Sequence[Sequence[Action]]) -> Figures:
    """The figures of every device's order, of orders that ``replay`` has shown to finish."""
    ends = _ends(orders)
    work = [sum(UNITS[action.op] for action in order) for order in orders]
    begins = [each[0] - UNITS[order[0].op] if order else 0 for each, order in zip(ends, orders, strict=True)]
    spent = [each[-1] - begin if each else 0 for each, begin in zip(ends, begins, strict=True)]
    makespan = max((each[-1] for each in ends if each), default=0)
    return Figures(max(spent) / max(work) - 1, makespan, [max(held(order), default=0) for order in orders])


def steady_bubble(orders_of: Callable[[int], Sequence[Sequence[Action]]], minibatches: int) -> float:
    """The bubble of a minibatch while training goes on, as a part of the units of work of the busiest device.

    ``orders_of`` gives the orders for so many minibatches: the units of a minibatch are those by which twice as many of
    them take longer.
    """
    short, long = (orders_of(count) for count in (minibatches, 2 * minibatches))
    longer = figures(long).makespan - figures(short).makespan
    work = [
        sum(UNITS[each.op] for each in more) - sum(UNITS[each.op] for each in less)
        for less, more in zip(short, long, strict=True)
    ]
    return longer / max(work) - 1


def _ends(orders: Sequence[Sequence[Action]]) -> list[list[int]]:
    """When each action ends, begun as soon as its device is free and what it needs is there."""
    stages = 1 + max(action.stage for order in orders for action in order)
    ends: list[list[int]] = [[] for _ in orders]
    made: Made = set()
    at: dict[tuple[str, int, int], int] = {}
    while any(len(mine) < len(order) for mine, order in zip(ends, orders, strict=True)):
        for mine, order in zip(ends, orders, strict=True):
            while len(mine) < len(order) and not missing(action := order[len(mine)], stages, made):
                ready = [
                    at.get((need.value, action.stage + need.stage, action.microbatch), 0)
                    for need in action.operation.needs
                ]
                mine.append(max([*mine[-1:], *ready]) + UNITS[action.op])
                values = [(value, action.stage, action.microbatch) for value in action.operation.makes]
                made.update(values)
                at.update(dict.fromkeys(values, mine[-1]))
    return ends
