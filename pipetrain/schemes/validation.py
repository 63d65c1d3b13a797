"""Whether a scheme can train: its orders are complete and finish, and every action's weights are there to be read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pipetrain.schemes.actions import ORDERED, Action, completes
from pipetrain.schemes.dry_run import Feed, ScheduleError, check_complete, replay
from pipetrain.schemes.policies import Read
from pipetrain.schemes.schedules import groups_of
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.splitting import window
from pipetrain.schemes.table import is_known
from pipetrain.schemes.weight_versions import WeightVersions

FORWARD = "outputs"  # what a forward makes
Orders = list[list[Action]]  # of every device


def check_own(scheme: Scheme, stages: int, microbatches: int) -> None:
    """``check`` of a scheme that is none of the table, once for each number of stages and microbatches."""
    if not is_known(scheme):
        _check_once(scheme, stages, microbatches)


@lru_cache(maxsize=1024)
def _check_once(scheme: Scheme, stages: int, microbatches: int) -> None:
    check(scheme, stages, microbatches)


def check(scheme: Scheme, stages: int, microbatches: int) -> None:
    """Dry-run a scheme for so many stages: its schedule, fed as training feeds it, with numbers for weights.

    Raises ScheduleError, naming the action, for an order that leaves something out or does it twice, that reads what is
    not there yet, in which microbatches overtake each other, or that waits for ever; for a schedule that finds other
    versions than it says; and for a policy that reads weights that are not there, or predicts where it says that it
    does not. Raises ValueError for a number of stages that the schedule does not have.
    """
    scheme.schedule.devices(stages)
    minibatches = 3 if scheme.schedule.flushes else 3 + -(-stages // microbatches)
    try:
        orders = _dry_run(scheme, stages, minibatches, microbatches)
        for stage in range(stages):
            device = scheme.schedule.place(stage, len(orders))
            own = [action for action in orders[device] if action.stage == stage]
            _check_minibatches(own, microbatches)
            _check_weights(scheme, stage, stages, microbatches, own)
    except ScheduleError as error:
        raise ScheduleError(
            f"The schedule of {scheme.name!r} cannot run. Received: stages={stages}, microbatches={microbatches}. "
            f"{error}"
        ) from error


def _dry_run(scheme: Scheme, stages: int, minibatches: int, microbatches: int) -> Orders:
    """Every device's order, which finishes."""
    schedule, groups = scheme.schedule, groups_of(minibatches, microbatches)
    devices = schedule.devices(stages)
    asked_after: list[list[int]] = [[] for _ in range(devices)]
    orders: Orders = [[] for _ in range(devices)]

    def asked(device: int) -> Iterator[range]:
        for group in groups:
            asked_after[device].append(len(orders[device]))
            yield group

    for device in range(devices):
        mine = schedule.stages_on(device, stages)
        for action in _listed(schedule.order(device, devices, asked(device)), device):
            _check_action(action, device, mine)
            orders[device].append(action)
            if len(orders[device]) > len(ORDERED) * len(mine) * minibatches * microbatches:
                raise ScheduleError(f"The order of device {device} does not end when there are no more minibatches.")
        if len(mine) != schedule.chunks:
            raise ScheduleError(f"Device {device} has the stages {mine}, not {schedule.chunks} of them.")
    check_complete([action for order in orders for action in order], stages, minibatches * microbatches)
    for device, order in enumerate(orders):
        _check_asked(order, asked_after[device], min(action.stage for action in order), groups)
    replay(orders, Feed(groups, asked_after, window(stages, microbatches, schedule.flushes), schedule.flushes), stages)
    return orders


def _listed(order: Any, device: int) -> Iterator[Any]:
    try:
        return iter(order)
    except TypeError as error:
        raise ScheduleError(f"The order of device {device} gives {order!r}, not one action after another.") from error


def _check_action(action: Any, device: int, mine: list[int]) -> None:
    if not isinstance(action, Action) or action.op not in ORDERED:
        raise ScheduleError(
            f"{action!r} stands in the order of device {device}, which is no Action of {', '.join(ORDERED)}."
        )
    if action.stage not in mine:
        raise ScheduleError(f"{action} stands in the order of device {device}, which has the stages {mine}.")


def _check_asked(order: list[Action], asked_after: list[int], first: int, groups: list[range]) -> None:
    """A device learns of a minibatch when it arrives at its first stage, all of the one before having gone on."""
    for number, after in enumerate(asked_after):
        taken = {each.microbatch for each in order[:after] if each.stage == first and FORWARD in each.operation.makes}
        left = next((m for group in groups[:number] for m in group if m not in taken), None)
        if left is not None:
            raise ScheduleError(
                f"The order asks for minibatch {number} before it has given {first}F{left}, of the one before: in "
                "training it would be given that one again."
            )


def _check_minibatches(order: list[Action], microbatches: int) -> None:
    """A stage has one minibatch's gradients at a time."""
    begun = -1
    for action in order:
        minibatch = action.microbatch // microbatches
        if action.updates and minibatch < begun:
            raise ScheduleError(f"{action} comes after a backward of the next minibatch: their gradients would be one.")
        begun = max(begun, minibatch) if action.updates else begun


def _check_weights(scheme: Scheme, stage: int, stages: int, microbatches: int, order: list[Action]) -> None:
    """What the policy reads is there, and the schedule finds what it says."""
    versions = WeightVersions(scheme, stage, stages, microbatches, newest=lambda ahead: 0, keep=lambda ahead: 0)
    for action, completed in zip(order, completes(order, microbatches), strict=True):
        reader = scheme.reader(action.microbatch, stage, stages, microbatches)
        if "forward" in action.operation.reads and reader.newest() != versions.version:
            raise ScheduleError(
                f"{action} finds {versions.version} updates made; by the schedule's ``found`` there are "
                f"{reader.newest()}."
            )
        for way in action.operation.reads:
            read = getattr(scheme.policy, way)(reader)
            _check_read(read, action, versions.version, scheme.policy.predicts)
            try:
                getattr(versions, way)(action.microbatch)
            except KeyError as error:
                raise ScheduleError(
                    f"{action} reads version {read.version} in its {way}; of {versions.version} updates' versions, "
                    "only those are held that the stage's next forward or backward still reads."
                ) from error
        if completed:
            versions.before_update()


def _check_read(read: Any, action: Action, newest: int, predicts: bool) -> None:
    if not isinstance(read, Read) or not 0 <= read.version <= newest or read.horizon < 0:
        raise ScheduleError(f"{action} is to read {read!r}; versions are 0 to {newest}, horizons 0 or more.")
    if read.horizon and not predicts:
        raise ScheduleError(f"{action} is to read {read!r}, predicted, by a policy of predicts=False.")
