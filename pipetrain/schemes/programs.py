"""Programs: what every device does in one call of a function: a schedule's actions, and the updates they lead to.

A schedule's order says what a device computes. A program adds to it what the devices' one function has to do as well,
and which actions are one call of a stage: F and B of one microbatch at the last stage, and the W of one stage that
follow each other. Sends need no place of their own: a value leaves its device when it is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from pipetrain.schemes.actions import Action
from pipetrain.schemes.schedules import Order, Schedule, fused, fusible, groups_of, joined

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
