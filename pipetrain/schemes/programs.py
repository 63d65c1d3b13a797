"""Programs: what every device does in one call of a function: a schedule's actions, and the updates they lead to.

A schedule's order says what a device computes. A program adds to it what the devices' one function has to do as well,
and which actions are one call of a stage: F and B of one microbatch at the last stage, and the W of one stage that
follow each other. Sends need no place of their own: a value leaves its device when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from pipetrain.schemes.actions import Action, completes
from pipetrain.schemes.schedules import Schedule, fused, fusible, groups_of, joined

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
        made = [*_calls(schedule, device, devices, stages - 1, microbatches, apart)]
        at_once = len(schedule.stages_on(device, stages)) if together else 1
        calls.append(tuple(_with_updates(made, microbatches, at_once)))
    return Program(tuple(calls), together)


def _calls(
    schedule: Schedule, device: int, devices: int, last: int, microbatches: int, apart: bool
) -> Iterator[list[Action]]:
    order = schedule.order
    actions = iter(order(device, devices, groups_of(1, microbatches)))
    has_last = schedule.place(last, devices) == device
    if has_last and not apart and fusible(order, device, devices, last, microbatches):
        actions = fused(actions, last)
    return joined(actions, microbatches)


def _with_updates(calls: Sequence[list[Action]], microbatches: int, at_once: int) -> Iterator[Call]:
    """The calls, and after them the updates: ``at_once`` stages', when all of these have their gradients."""
    flat = [action for call in calls for action in call]
    ends = iter(completes(flat, microbatches))
    waiting: list[Action] = []
    for call in calls:
        yield tuple(call)
        waiting += [action._replace(op="U") for action in call if next(ends)]
        if len(waiting) == at_once:
            for action in sorted(waiting, key=lambda each: each.stage):
                yield (action,)
            waiting.clear()
