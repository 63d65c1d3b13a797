"""Programs: what every device does in one call of a function: a schedule's actions, and the updates they lead to.

A schedule's order says what a device computes. A program adds to it what the devices' one function has to do as well,
and which actions are one call of a stage: F and B of one microbatch at the last stage, and the W of one stage that
follow each other. Sends need no place of their own: a value leaves its device when it is made.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import count, islice, takewhile
from typing import Any, NamedTuple

from pipetrain.schemes.actions import Action
from pipetrain.schemes.dry_run import UNITS
from pipetrain.schemes.schedules import Order, Schedule, asynchronous, fused, fusible, groups_of, joined

Call = tuple[Action, ...]  # one action, or several W of one stage, which are one call


class Program(NamedTuple):
    """What devices do: ``calls[d]`` are those of device d, in order.

    ``U`` is a stage's update by the gradients of the minibatch of its microbatch, the last one of these. ``together``:
    whether the stages of a device update when all of them have these gradients.
    """

    calls: tuple[tuple[Call, ...], ...]
    together: bool = False

    def actions(self, device: int) -> list[Action]:
        """All actions of a device."""
        return [action for call in self.calls[device] for action in call]

    def apart(self) -> Program:
        """The same with F and B, or I, as calls of their own."""
        calls = tuple(tuple(part for call in mine for part in _apart(call)) for mine in self.calls)
        return self._replace(calls=calls)

    def entering(self, stage: int, microbatches: int) -> list[int]:
        """The minibatches of so many microbatches of which any go forward at a stage."""
        forwards = (each for each in self.all_actions() if "outputs" in each.operation.makes)
        return sorted({each.microbatch // microbatches for each in forwards if each.stage == stage})

    def later(self, microbatches: int) -> Program:
        """The same for microbatches so much later."""
        calls = (tuple(tuple(each.later(microbatches) for each in call) for call in mine) for mine in self.calls)
        return self._replace(calls=tuple(calls))

    def all_actions(self) -> list[Action]:
        """Those of all devices."""
        return [action for device in range(len(self.calls)) for action in self.actions(device)]


def _apart(call: Call) -> tuple[Call, ...]:
    first = call[0]
    if first.op not in ("FB", "FI"):
        return (call,)
    return (first._replace(op="F"),), (first._replace(op="B" if first.op == "FB" else "I"),)


@lru_cache(maxsize=64)
def of_minibatch(
    schedule: Schedule, stages: int, microbatches: int, together: bool = False, apart: bool = False
) -> Program:
    """The program of one minibatch of a schedule that flushes: it begins and ends with an empty pipeline.

    Args:
        schedule: the order of actions.
        stages: N.
        microbatches: M, of the minibatch.
        together: whether the stages of a device update when all of them have the minibatch's gradients, since the
            update of one depends on those of others.
        apart: whether F and B of the last stage are calls of their own.
    """
    devices = schedule.devices(stages)
    calls = []
    for device in range(devices):
        last = stages - 1 if schedule.place(stages - 1, devices) == device and not apart else None
        at_once = len(schedule.stages_on(device, stages)) if together else 1
        actions = schedule.order(device, devices, groups_of(1, microbatches))
        calls.append(tuple(calls_of(actions, schedule.order, device, devices, last, microbatches, at_once)))
    return Program(tuple(calls), together)


def calls_of(
    actions: Iterator[Action],
    order: Order,
    device: int,
    devices: int,
    last: int | None,
    microbatches: int,
    at_once: int = 1,
    made: Counter[tuple[int, int]] | None = None,
) -> Iterator[Call]:
    """A device's actions as calls, and after them the updates: ``at_once`` stages', when these have their gradients.

    Args:
        actions: of the device, in order.
        order: of which they are.
        device: its number.
        devices: how many there are.
        last: the last stage, if the device has it and may make its F and B one call.
        microbatches: of a minibatch.
        at_once: how many stages update together.
        made: the gradients of each stage and minibatch that wait for their update, before these actions and after.
    """
    if last is not None and fusible(order, device, devices, last, microbatches):
        actions = fused(actions, last)
    made = Counter[tuple[int, int]]() if made is None else made
    waiting: list[Action] = []
    for call in joined(actions, microbatches, made.copy()):
        yield tuple(call)
        for action in call:
            place = action.stage, action.microbatch // microbatches
            made[place] += action.updates
            if action.updates and made[place] == microbatches:
                del made[place]
                waiting.append(action._replace(op="U"))
        if len(waiting) == at_once:
            for action in sorted(waiting, key=lambda each: each.stage):
                yield (action,)
            waiting.clear()


class _Planned(NamedTuple):
    """An action of a device, when it begins and ends if data never end, and how many minibatches were asked for."""

    action: Action
    begin: int
    end: int
    asked: int


class _Device:
    """The actions of one device: those of data without end, planned ahead, and those of the data that there are."""

    def __init__(self, schedule: Schedule, device: int, devices: int, microbatches: int) -> None:
        self._microbatches = microbatches
        self.asked = 0  # by what is planned
        self._end: int | None = None  # how many minibatches there are, once that is known
        self._endless = schedule.order(device, devices, self._groups(is_endless=True))
        self._given = schedule.order(device, devices, self._groups(is_endless=False))
        self.next = next(self._endless)
        self.planned = deque[_Planned]()
        self.free = 0  # when everything planned has ended

    def _groups(self, is_endless: bool) -> Iterator[range]:
        for number in takewhile(lambda n: is_endless or self._end is None or n < self._end, count()):
            self.asked = number + 1 if is_endless else self.asked
            yield range(number * self._microbatches, (number + 1) * self._microbatches)

    def plan(self, begin: int) -> None:
        """The next action begins then."""
        self.free = begin + UNITS[self.next.op]
        self.planned.append(_Planned(self.next, begin, self.free, self.asked))
        self.next = next(self._endless)

    def take(self, number: int) -> list[Action]:
        """So many planned actions, which are now to be done."""
        for _ in range(number):
            self.planned.popleft()
        return [next(self._given) for _ in range(number)]

    def skip(self, number: int) -> None:
        """So many actions are planned, and as many done, that are like those before them."""
        *_, self.next = islice(self._endless, number)
        deque(islice(self._given, number), maxlen=0)

    def shifted(self, minibatches: int) -> None:
        """What is planned is of so many minibatches later."""
        by = minibatches * self._microbatches
        self.planned = deque(
            each._replace(action=each.action.later(by), asked=each.asked + minibatches) for each in self.planned
        )

    def rest(self, minibatches: int) -> list[Action]:
        """All further actions, as there are only so many minibatches."""
        self._end = minibatches
        return list(self._given)


class _Steady(NamedTuple):
    """What every slice of so many minibatches is from now on, counted from its first one."""

    minibatches: int
    program: Program
    needs: int
    actions: list[int]  # of each device


class Course:
    """What devices do from an empty pipeline on, in slices whose microbatches are counted from their first result on.

    When a slice is like the one before, all later ones of as many minibatches are: they are not planned one by one.

    Args:
        schedule: one that does not flush.
        stages: N.
        microbatches: M, of a minibatch.
        apart: whether F and B of the last stage are calls of their own.

    ``results`` are the minibatches that the last stage has done with so far.
    """

    def __init__(self, schedule: Schedule, stages: int, microbatches: int, apart: bool = False) -> None:
        self._schedule, self._stages, self._microbatches, self._apart = schedule, stages, microbatches, apart
        count = schedule.devices(stages)
        self._devices = [_Device(schedule, device, count, microbatches) for device in range(count)]
        self._made: dict[tuple[str, int, int], int] = {}  # when values are there that are still needed
        self._ends: dict[int, int] = {}  # when the last stage will have done with a minibatch
        self._left: dict[int, int] = {}  # actions of a minibatch that the last stage has not planned yet
        self._have = set[tuple[str, int, int]]()  # the same values, of actions that were taken
        self._counts = [Counter[tuple[int, int]]() for _ in self._devices]  # gradients that wait for their update
        self._steady: _Steady | None = None
        self._skipped = 0  # minibatches since then
        self._state: Any = None  # after the last slice, and with how many minibatches
        self.results = 0

    def needs(self, results: int) -> int:
        """How many minibatches must have come for the slice that ends with so many results."""
        if self._steady and results - self.results == self._steady.minibatches:
            return self.results + self._steady.needs
        self._resume()
        end = self._end_of(results)
        return max((each.asked for mine in self._devices for each in mine.planned if each.begin < end), default=0)

    def slice(self, results: int, posted: int) -> Program:
        """What is done up to so many results, if so many minibatches have come; more is not done if fewer have."""
        begun, needs = self.results, self.needs(results)
        if self._steady and needs <= posted:
            for device, number in zip(self._devices, self._steady.actions, strict=True):
                device.skip(number)
            self._skipped += self._steady.minibatches
            self.results = results
            return self._steady.program
        self._resume()
        end = self._end_of(results)
        numbers = [0] * len(self._devices)
        progress = True
        while progress:
            progress = False
            for n, device in enumerate(self._devices):
                for planned in islice(device.planned, numbers[n], None):
                    if planned.begin >= end or planned.asked > posted or not self._can(planned.action):
                        break
                    self._do(planned.action)
                    numbers[n] += 1
                    progress = True
        taken = [device.take(number) for device, number in zip(self._devices, numbers, strict=True)]
        self.results = results
        program = self._program(taken, begun)
        self._compare(results - begun, program, needs - begun, numbers)
        return program

    def rest(self, posted: int) -> Program:
        """All that is left to do when only so many minibatches come."""
        self._resume()
        begun, self.results = self.results, posted
        return self._program([device.rest(posted) for device in self._devices], begun)

    def _compare(self, minibatches: int, program: Program, needs: int, actions: list[int]) -> None:
        """Notice that slices repeat themselves, which those of an order of one's own need not do for ever."""
        if self._schedule.order is not asynchronous:
            return
        by, now = -self.results * self._microbatches, max(device.free for device in self._devices)
        planned = [
            [(each.action.later(by), each.begin - now, each.end - now) for each in device.planned]
            for device in self._devices
        ]
        made = {(value, stage, m + by): when - now for (value, stage, m), when in self._made.items()}
        state = minibatches, program, planned, made, [device.free - now for device in self._devices]
        if state == self._state:
            self._steady = _Steady(minibatches, program, needs, actions)
        self._state = state

    def _resume(self) -> None:
        """Plan slices one by one again."""
        skipped, self._skipped, self._steady = self._skipped, 0, None
        if not skipped:
            return
        by = skipped * self._microbatches
        self._made = {(value, stage, m + by): when for (value, stage, m), when in self._made.items()}
        self._have = {(value, stage, m + by) for value, stage, m in self._have}
        self._ends = {minibatch + skipped: end for minibatch, end in self._ends.items()}
        self._left = {minibatch + skipped: left for minibatch, left in self._left.items()}
        for n, made in enumerate(self._counts):
            self._counts[n] = Counter({(stage, i + skipped): number for (stage, i), number in made.items()})
        for device in self._devices:
            device.shifted(skipped)

    def _program(self, actions: list[list[Action]], begun: int) -> Program:
        place, devices = self._schedule.place(self._stages - 1, len(self._devices)), len(self._devices)
        calls = []
        for device, mine in enumerate(actions):
            last = self._stages - 1 if place == device and not self._apart else None
            given = self._schedule.order, device, devices, last, self._microbatches
            made = calls_of(iter(mine), *given, made=self._counts[device])
            by = -begun * self._microbatches
            calls.append(tuple(tuple(action.later(by) for action in call) for call in made))
        return Program(tuple(calls))

    def _can(self, action: Action) -> bool:
        return all(need in self._have for need in self._needed(action))

    def _do(self, action: Action) -> None:
        self._have.difference_update(self._needed(action))
        self._have.update(self._awaited(action))

    def _needed(self, action: Action) -> list[tuple[str, int, int]]:
        """The values that the action needs, each of which nobody else does."""
        return [
            (need.value, action.stage + need.stage, action.microbatch)
            for need in action.operation.needs
            if 0 <= action.stage + need.stage < self._stages
        ]

    def _awaited(self, action: Action) -> list[tuple[str, int, int]]:
        """The values that it makes and another one needs."""
        ends = {("outputs", self._stages - 1), ("input gradients", 0)}
        return [
            (value, action.stage, action.microbatch)
            for value in action.operation.makes
            if value != "weight gradients" and (value, action.stage) not in ends
        ]

    def _end_of(self, results: int) -> int:
        """When the slice with so many results ends; everything that begins before that is planned."""
        while results - 1 not in self._ends and results:
            self._plan(None)
        end = self._ends[results - 1] if results else 0
        while self._plan(end):
            pass
        return end

    def _plan(self, before: int | None) -> bool:
        """Let every device plan an action, if one begins before then; whether there was any."""
        progress = False
        for device in self._devices:
            needed = self._needed(device.next)
            if any(need not in self._made for need in needed):
                continue
            begin = max([device.free, *(self._made[need] for need in needed)])
            if before is not None and begin >= before:
                continue
            action = device.next
            for need in needed:
                del self._made[need]
            device.plan(begin)
            self._made.update(dict.fromkeys(self._awaited(action), device.free))
            self._note(device, action)
            progress = True
        if not progress and before is None:
            raise RuntimeError(f"No device can go on. Received: {[str(each.next) for each in self._devices]}.")
        return progress

    def _note(self, device: _Device, action: Action) -> None:
        """Note when the last stage has done with a minibatch."""
        if action.stage != self._stages - 1:
            return
        minibatch = action.microbatch // self._microbatches
        left = self._left.setdefault(minibatch, self._microbatches)
        self._left[minibatch] = left - action.updates
        if not self._left[minibatch]:
            del self._left[minibatch]
            self._ends[minibatch] = device.free
            self._ends.pop(minibatch - 1024, None)


def calls_of_functions(
    schedule: Schedule, stages: int, microbatches: int, minibatches: int, at_once: int = 1
) -> list[Program]:
    """What devices do in each call for so many minibatches of an empty pipeline, microbatches counted from the first.

    Args:
        schedule: any; one that flushes has a call for each minibatch.
        stages: N.
        microbatches: M, of a minibatch.
        minibatches: how many there are.
        at_once: how many of them a call has, where the schedule does not flush. The pipeline drains in the last call.
    """
    if schedule.flushes:
        program = of_minibatch(schedule, stages, microbatches)
        return [program.later(number * microbatches) for number in range(minibatches)]
    course, programs = Course(schedule, stages, microbatches), []
    while (until := course.results + at_once) <= minibatches and course.needs(until) <= minibatches:
        begun = course.results
        programs.append(course.slice(until, minibatches).later(begun * microbatches))
    begun = course.results
    return [*programs, course.rest(minibatches).later(begun * microbatches)]
