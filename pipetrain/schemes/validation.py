"""A dry run of a schedule in unit time: proves that it finishes, and draws it as a text grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipetrain.schemes.actions import Action

Step = list[Action | None]


class ScheduleError(ValueError):
    """A schedule that cannot run: the message holds the grid as far as it went."""


def replay(orders: Sequence[Sequence[Action]]) -> list[Step]:
    """Run every stage's order with one unit of time per action; returns what each stage did in each unit.

    An action starts once its inputs exist: F needs the same microbatch's F one stage up; B needs its own
    F and the B one stage down. Raises ScheduleError when an action is missing or doubled, when a backward
    stands before its forward, and when no stage can go on.
    """
    _check_complete(orders)
    done: set[Action] = set()
    position = [0] * len(orders)
    steps: list[Step] = []
    while any(position[k] < len(order) for k, order in enumerate(orders)):
        step: Step = [
            order[position[k]] if position[k] < len(order) and _ready(order[position[k]], len(orders), done) else None
            for k, order in enumerate(orders)
        ]
        ran = [action for action in step if action is not None]
        if not ran:
            raise ScheduleError("Deadlock: no stage can go on.\n" + _stuck(orders, steps, position))
        done.update(ran)
        steps.append(step)
        for action in ran:
            position[action.stage] += 1
    return steps


def grid(steps: Sequence[Step]) -> str:
    """The dry run as text: a row per stage, a column per unit of time, ``.`` where a stage waits."""
    rows = []
    for stage in range(len(steps[0])):
        cells = [f"{action.op}{action.minibatch}" if (action := step[stage]) else "." for step in steps]
        rows.append(f"{stage}: " + " ".join(f"{cell:<3}" for cell in cells).rstrip())
    return "\n".join(rows)


def _ready(action: Action, stages: int, done: set[Action]) -> bool:
    op, stage, microbatch = action
    if op == "F":
        return stage == 0 or Action("F", stage - 1, microbatch) in done
    below = stage == stages - 1 or Action("B", stage + 1, microbatch) in done
    return below and Action("F", stage, microbatch) in done


def _check_complete(orders: Sequence[Sequence[Action]]) -> None:
    expected = {action.minibatch for order in orders for action in order}
    for stage, order in enumerate(orders):
        strangers = [str(action) for action in order if action.stage != stage]
        if strangers:
            raise ScheduleError(f"Stage {stage} is given another stage's actions: {strangers[:5]}.")
        count = Counter(order)
        for microbatch in sorted(expected):
            for action in (Action("F", stage, microbatch), Action("B", stage, microbatch)):
                if count[action] != 1:
                    raise ScheduleError(f"{action} stands {count[action]} times in stage {stage}'s order, not once.")


def _stuck(orders: Sequence[Sequence[Action]], steps: Sequence[Step], position: Sequence[int]) -> str:
    rows = grid(steps).split("\n") if steps else [f"{stage}:" for stage in range(len(orders))]
    for stage, order in enumerate(orders):
        if position[stage] < len(order):
            rows[stage] += f"  {order[position[stage]]} <-- ERROR HERE"
    return "\n".join(rows)
