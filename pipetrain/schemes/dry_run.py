"""A dry run of orders in unit time: proves that they are complete, draws them as a text grid, and tells their times.

These are the units in which papers state bubbles; a whole backward takes two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from pipetrain.schemes.actions import HELD, OPERATIONS, SENT, Action, Value, held
from pipetrain.schemes.schedules import Order, groups_of

Step = list[Action | None]
Made = set[tuple[Value, int, int]]  # a value, whose stage's it is, and of which microbatch


class ScheduleError(ValueError):
    """A schedule that cannot run: the message names the action, and holds the grid as far as it went."""


class Feed(NamedTuple):
    """How minibatches arrive, as in training.

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


@lru_cache(maxsize=256)
def waiting(order: Order, devices: int, microbatches: int) -> float:
    """The units of time in which the busiest device waits, per unit in which it works, from empty to empty again."""
    actions = [list(order(device, devices, groups_of(1, microbatches))) for device in range(devices)]
    return len(replay(actions)) / max(map(len, actions)) - 1


def replay(orders: Sequence[Sequence[Action]], feed: Feed | None = None, stages: int | None = None) -> list[Step]:
    """Run every device's order with one unit of time per action; returns what each device did in each unit.

    An action starts once all that its operation needs is there, see ``actions.OPERATIONS``, and what its device has
    asked for has arrived; without ``feed`` all minibatches are there at first: those that some action is of. There are
    as many stages as are named, if their number is not given.

    Raises ScheduleError when an action is missing, doubled or of no such stage or microbatch, when one stands before
    what it needs, when microbatches overtake each other, and when no device can go on.
    """
    every = [action for order in orders for action in order]
    stages = stages or 1 + max((action.stage for action in every), default=0)
    check_complete(every, stages, sum(map(len, feed.groups)) if feed else None)
    _check_sequence(orders, stages)
    caller = _Caller(feed, every, stages) if feed else None
    devices = [OrderedDevice(order, stages, number, caller) for number, order in enumerate(orders)]
    steps: list[Step] = []
    for step in stepped(devices):
        steps.append(step)
        for action in step:
            if caller and action is not None:
                caller.note(action)
    if any(device.left for device in devices):
        raise ScheduleError("Deadlock: no device can go on.\n" + _stuck(orders, steps, stages))
    return steps


class _Caller:
    """Takes the results of all these actions, and posts minibatches as its feed says."""

    def __init__(self, feed: Feed, actions: Sequence[Action], stages: int) -> None:
        self.feed, self._stages, self._waiting, self._taken = feed, stages, feed.results(actions, stages), 0

    @property
    def posted(self) -> int:
        """How many groups are posted."""
        while self._taken < len(self._waiting) and not self._waiting[self._taken]:
            self._taken += 1
        return self._taken + self.feed.ahead

    def note(self, action: Action) -> None:
        """An action is done."""
        if self.feed.reports(action, self._stages):
            self._waiting[action.microbatch // len(self.feed.groups[0])] -= 1


class UnitDevice(Protocol):
    """A device in unit times, and how many actions it has left."""

    @property
    def left(self) -> int:
        """How many actions are left."""

    def next(self, made: Made) -> Action | None:
        """The action that it begins now that this is made; None if it waits."""


class OrderedDevice:
    """A device that does its actions in their order, each once what it needs is made and what it asks for is there."""

    def __init__(self, order: Sequence[Action], stages: int, number: int = 0, caller: _Caller | None = None) -> None:
        self._order, self._stages, self._number, self._caller = order, stages, number, caller
        self._first, self._position = min((action.stage for action in order), default=0), 0

    @property
    def left(self) -> int:
        """How many actions are left."""
        return len(self._order) - self._position

    def next(self, made: Made) -> Action | None:
        """The next action of the order, if it can begin."""
        if not self.left or missing(action := self._order[self._position], self._stages, made):
            return None
        caller, place = self._caller, (self._number, self._position, self._first)
        if caller is not None and not caller.feed.arrived(*place, caller.posted, made):
            return None
        self._position += 1
        return action


def stepped(devices: Sequence[UnitDevice], units: Mapping[str, int] | None = None) -> Iterator[Step]:
    """What each device begins in each unit of time, until none can go on.

    An action takes one unit, or those of its operation, and has made what it makes at their end.
    """
    made: Made = set()
    ending: dict[int, list[Action]] = {}
    free, now = [0] * len(devices), 0
    while any(device.left for device in devices):
        step = [device.next(made) if free[k] <= now else None for k, device in enumerate(devices)]
        for k, action in enumerate(step):
            if action is not None:
                free[k] = now + (units[action.op] if units else 1)
                ending.setdefault(free[k], []).append(action)
        if not ending:
            return
        yield step
        now += 1
        for action in ending.pop(now, ()):
            made.update((value, action.stage, action.microbatch) for value in action.operation.makes)


def grid(steps: Sequence[Step]) -> str:
    """The dry run as text: a row per device, a column per unit of time, ``.`` where it waits.

    Stages are named where devices have several: ``2F3`` for stage 2, forward, microbatch 3.
    """
    several = any(action is not None and action.stage != k for step in steps for k, action in enumerate(step))
    rows = []
    for device in range(len(steps[0])):
        names = [str(action) if action else "." for action in (step[device] for step in steps)]
        rows.append([name if several else name.removeprefix(str(device)) for name in names])
    width = max(4 if several else 3, *(len(cell) for cells in rows for cell in cells))
    lines = (" ".join(f"{cell:<{width}}" for cell in cells).rstrip() for cells in rows)
    return "\n".join(f"{device}: {line}" for device, line in enumerate(lines))


def missing(action: Action, stages: int, made: Made) -> list[str]:
    """What the action needs that is not made, as text for people."""
    return [
        f"{need.value} of stage {action.stage + need.stage}"
        for need in action.operation.needs
        if 0 <= action.stage + need.stage < stages
        and (need.value, action.stage + need.stage, action.microbatch) not in made
    ]


def check_complete(actions: Sequence[Action], stages: int, microbatches: int | None) -> None:
    """Raise ScheduleError unless every microbatch goes forward once at every stage, and back once, whole or in halves.

    There are so many microbatches, or if their number is not given those that some action is of.
    """
    counts = Counter(actions)
    given = sorted({action.microbatch for action in counts}) if microbatches is None else range(microbatches)
    last = given[-1] if given else -1
    for action, count in counts.items():
        if count > 1:
            raise ScheduleError(f"{action} stands {count} times in the orders, not once.")
        if not 0 <= action.microbatch <= last or not 0 <= action.stage < stages:
            raise ScheduleError(f"{action} is of no such stage or microbatch: there are {stages} stages.")
    for microbatch in given:
        for stage in range(stages):
            _check_operations([op for op in OPERATIONS if (op, stage, microbatch) in counts], stage, microbatch)


def _check_operations(ops: Sequence[str], stage: int, microbatch: int) -> None:
    """What a stage does with one microbatch makes all that it needs, every value once, and frees what it keeps."""

    def named(op: str) -> str:
        return f"{stage}{op}{microbatch}"

    made = Counter(value for op in ops for value in OPERATIONS[op].makes)
    forwards = [op for op in ops if "outputs" in OPERATIONS[op].makes]
    if len(forwards) != 1:
        told = " stands beside ".join(map(named, forwards)) or f"{named('F')} is missing"
        raise ScheduleError(f"{told}: a stage's forward comes once.")
    needed = {need.value for op in ops for need in OPERATIONS[op].needs if not need.stage}
    if needed - {*made} or max(made.values()) > 1:
        given = ", ".join(named(op) for op in ops if op not in forwards)
        raise ScheduleError(f"The backward of {named(forwards[0])} is B, or I and W; it is given {given}.")
    for op in ops:
        for value in {*OPERATIONS[op].makes} & HELD:
            frees = [each for each in OPERATIONS if value in OPERATIONS[each].frees]
            if not {*frees} & {*ops}:
                raise ScheduleError(f"{named(frees[0])} is missing: {named(op)} has no {OPERATIONS[frees[0]].about}.")


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


def _stuck(orders: Sequence[Sequence[Action]], steps: Sequence[Step], stages: int) -> str:
    done = [action for step in steps for action in step if action is not None]
    made: Made = {(value, each.stage, each.microbatch) for each in done for value in each.operation.makes}
    rows = grid(steps).split("\n") if steps else [f"{device}:" for device in range(len(orders))]
    for device, order in enumerate(orders):
        position = sum(step[device] is not None for step in steps)
        if position < len(order):
            needed = missing(order[position], stages, made) or ["a minibatch that is posted after it"]
            rows[device] += f"  {order[position]} <-- ERROR HERE: needs {', '.join(needed)}"
    return "\n".join(rows)


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
    for now, step in enumerate(stepped([OrderedDevice(order, stages) for order in orders], UNITS)):
        for mine, action in zip(ends, step, strict=True):
            if action is not None:
                mine.append(now + UNITS[action.op])
    return ends
