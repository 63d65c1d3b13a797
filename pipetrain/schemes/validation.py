"""A dry run of a schedule in unit time: proves that it is complete and finishes, and draws it as a text grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from pipetrain.schemes.actions import OPERATIONS, SENT, Action, Value
from pipetrain.schemes.schedules import Order, groups_of
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.splitting import window

Step = list[Action | None]
Made = set[tuple[Value, int, int]]  # a value, whose stage's it is, and of which microbatch
WHOLE = (("B",), ("I", "W"), ("FB",))  # what a microbatch's backward at a stage may consist of


class ScheduleError(ValueError):
    """A schedule that cannot run: the message names the action, and holds the grid as far as it went."""


class Feed(NamedTuple):
    """The arrival of minibatches, as in training.

    The caller posts each group at most ``ahead`` after the last one that it has the result of: when every stage has
    done with it where the pipeline ``flushes``, else when the last stage has gone forward. Device d asks its order for
    group n after ``asked_after[d][n]`` actions.
    """

    groups: Sequence[range]
    asked_after: Sequence[Sequence[int]]
    ahead: int
    flushes: bool

    def results(self, actions: Sequence[Action], stages: int) -> list[int]:
        """For each group, how many of all these actions its result waits for."""
        counts = Counter(each.microbatch for each in actions if self.reports(each, stages))
        return [sum(counts[m] for m in group) for group in self.groups]

    def reports(self, action: Action, stages: int) -> bool:
        """Whether a group's result waits for the action."""
        return self.flushes or (action.stage == stages - 1 and "outputs" in action.operation.makes)

    def arrived(self, device: int, position: int, first: int, posted: int, made: Made) -> bool:
        """Whether all groups are there that the device, whose first stage this is, asks for up to this action."""
        asked = sum(after <= position for after in self.asked_after[device])
        if not asked:
            return True
        return asked <= posted if first == 0 else ("outputs", first - 1, self.groups[asked - 1][0]) in made


def check(scheme: Scheme, stages: int, microbatches: int) -> None:
    """Dry-run a scheme's schedule for so many stages, fed as training feeds it.

    Raises ScheduleError, naming the action, for an order that omits or repeats an action, that reads what is not there
    yet, in which microbatches overtake each other, or that deadlocks; ValueError for a number of stages that the
    schedule does not have.
    """
    schedule = scheme.schedule
    devices = schedule.devices(stages)
    minibatches = 3 if schedule.flushes else 3 + -(-stages // microbatches)
    try:
        _dry_run(schedule.order, devices, stages, minibatches, microbatches, schedule.flushes)
        for device in range(devices):
            _check_places(scheme, device, stages, microbatches)
    except ScheduleError as error:
        raise ScheduleError(
            f"The schedule of {scheme.name!r} cannot run. Received: stages={stages}, microbatches={microbatches}. "
            f"{error}"
        ) from error


def _check_places(scheme: Scheme, device: int, stages: int, microbatches: int) -> None:
    schedule = scheme.schedule
    mine = schedule.stages_on(device, stages)
    if len(mine) != schedule.chunks:
        raise ScheduleError(f"Device {device} has the stages {mine}, not {schedule.chunks} of them.")
    actions = schedule.order(device, schedule.devices(stages), groups_of(1, microbatches))
    for action in actions:
        if action.stage not in mine:
            raise ScheduleError(f"{action} stands in the order of device {device}, which has the stages {mine}.")


def _dry_run(order: Order, devices: int, stages: int, minibatches: int, microbatches: int, flushes: bool) -> list[Step]:
    groups = groups_of(minibatches, microbatches)
    asked_after: list[list[int]] = [[] for _ in range(devices)]
    orders: list[list[Action]] = [[] for _ in range(devices)]

    def asked(device: int) -> Iterator[range]:
        for group in groups:
            asked_after[device].append(len(orders[device]))
            yield group

    for device in range(devices):
        for action in order(device, devices, asked(device)):
            orders[device].append(action)
    return replay(orders, Feed(groups, asked_after, window(stages, microbatches, flushes), flushes))


@lru_cache(maxsize=256)
def waiting(order: Order, devices: int, microbatches: int) -> float:
    """The units of time in which the busiest device waits, per unit in which it works, from empty to empty again."""
    actions = [list(order(device, devices, groups_of(1, microbatches))) for device in range(devices)]
    return len(replay(actions)) / max(map(len, actions)) - 1


def replay(orders: Sequence[Sequence[Action]], feed: Feed | None = None) -> list[Step]:
    """Run every device's order with one unit of time per action; returns what each device did in each unit.

    An action starts once all that its operation needs is there, see ``actions.OPERATIONS``, and what its device has
    asked for has arrived; without ``feed`` all minibatches are there at first.

    Raises ScheduleError when an action is missing or doubled, when one stands before what it needs, when microbatches
    overtake each other, and when no device can go on.
    """
    every = [action for order in orders for action in order]
    stages = 1 + max((action.stage for action in every), default=0)
    _check_complete(every, stages)
    _check_sequence(orders, stages)
    made: Made = set()
    firsts = [min((action.stage for action in order), default=0) for order in orders]
    waiting = feed.results(every, stages) if feed else []
    position, taken = [0] * len(orders), 0
    steps: list[Step] = []
    while any(position[k] < len(order) for k, order in enumerate(orders)):
        while feed and taken < len(waiting) and not waiting[taken]:
            taken += 1
        step: Step = [None] * len(orders)
        for k, order in enumerate(orders):
            if position[k] == len(order) or _missing(order[position[k]], stages, made):
                continue
            if feed is None or feed.arrived(k, position[k], firsts[k], taken + feed.ahead, made):
                step[k] = order[position[k]]
        if not any(step):
            raise ScheduleError("Deadlock: no device can go on.\n" + _stuck(orders, steps, position, stages, made))
        for k, action in enumerate(step):
            if action is not None:
                made.update((value, action.stage, action.microbatch) for value in action.operation.makes)
                position[k] += 1
                if feed and feed.reports(action, stages):
                    waiting[action.microbatch // len(feed.groups[0])] -= 1
        steps.append(step)
    return steps


def grid(steps: Sequence[Step]) -> str:
    """The dry run as text: a row per device, a column per unit of time, ``.`` where it waits.

    Stages are named where devices have several: ``2F3`` for stage 2, forward, microbatch 3.
    """
    several = any(action is not None and action.stage != k for step in steps for k, action in enumerate(step))
    rows = []
    for device in range(len(steps[0])):
        named = [str(action) if several else str(action)[len(str(action.stage)) :] for action in _of(steps, device)]
        names = iter(named)
        cells = [next(names) if step[device] else "." for step in steps]
        rows.append(f"{device}: " + " ".join(f"{cell:<{4 if several else 3}}" for cell in cells).rstrip())
    return "\n".join(rows)


def _of(steps: Sequence[Step], device: int) -> list[Action]:
    return [action for step in steps if (action := step[device]) is not None]


def _missing(action: Action, stages: int, made: Made) -> list[str]:
    """The missing inputs of an action, as text."""
    return [
        f"{need.value} of stage {action.stage + need.stage}"
        for need in action.operation.needs
        if 0 <= action.stage + need.stage < stages
        and (need.value, action.stage + need.stage, action.microbatch) not in made
    ]


def _check_complete(actions: Sequence[Action], stages: int) -> None:
    """Every microbatch goes forward once at every stage, and back once, whole or in halves."""
    counts = Counter(actions)
    for action, count in counts.items():
        if count > 1:
            raise ScheduleError(f"{action} stands {count} times in the orders, not once.")
    for microbatch in sorted({action.microbatch for action in counts}):
        for stage in range(stages):
            ops = {op for op in OPERATIONS if Action(op, stage, microbatch) in counts}  # type: ignore[arg-type]
            if len(ops & {"F", "FB"}) != 1:
                raise ScheduleError(f"{stage}F{microbatch} is missing, or stands beside {stage}FB{microbatch}.")
            if "I" in ops and "W" not in ops:
                raise ScheduleError(f"{stage}W{microbatch} is missing: {stage}I{microbatch} leaves it to be done.")
            if ops == {"F"}:
                raise ScheduleError(f"{stage}B{microbatch} is missing: {stage}F{microbatch} has no backward.")
            if tuple(sorted(ops - {"F"})) not in WHOLE:
                doubled = ", ".join(f"{stage}{op}{microbatch}" for op in sorted(ops - {"F"}))
                raise ScheduleError(f"The backward of {stage}F{microbatch} is B, or I and W; it is given {doubled}.")


def _check_sequence(orders: Sequence[Sequence[Action]], stages: int) -> None:
    """What a stage sends arrives in the order of its sending: its neighbour takes microbatches in the same order."""
    of_stage: list[list[Action]] = [[] for _ in range(stages)]
    for order in orders:
        for action in order:
            of_stage[action.stage].append(action)
    for stage, actions in enumerate(of_stage):
        for value, towards in SENT.items():
            if not 0 <= stage + towards < stages:
                continue
            sent = [action for action in actions if value in action.operation.makes]
            taken = [each for each in of_stage[stage + towards] if (value, -towards) in each.operation.needs]
            for gives, takes in zip(sent, taken, strict=False):
                if gives.microbatch != takes.microbatch:
                    raise ScheduleError(f"Microbatches overtake each other: {takes} comes where {gives} has sent.")


def _stuck(
    orders: Sequence[Sequence[Action]], steps: Sequence[Step], position: Sequence[int], stages: int, made: Made
) -> str:
    rows = grid(steps).split("\n") if steps else [f"{device}:" for device in range(len(orders))]
    for device, order in enumerate(orders):
        if position[device] < len(order):
            missing = _missing(order[position[device]], stages, made) or ["a minibatch that is posted after it"]
            rows[device] += f"  {order[position[device]]} <-- ERROR HERE: needs {', '.join(missing)}"
    return "\n".join(rows)
