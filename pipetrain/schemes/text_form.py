"""Schemes as text: schedules in the field's form, a row of actions for each device in CSV, or names in a file.

``2F0`` is stage 2, forward, microbatch 0, and so with I, W and B; an empty cell is a step in which the device waits.
PyTorch's compute-only files are of this form (``torch.distributed.pipelining``). Its compound of two actions that
overlap, ``(0F1;7B0)OVERLAP_F_B``, is read as these two, one after the other: a device executes one action at a time.
Its ``0REDUCE_GRAD`` is left out: here replicas sum a stage's gradients after its last W or B of the minibatch.
"""

from __future__ import annotations

import csv
import difflib
import importlib.util
import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pipetrain.schemes.actions import Action, held
from pipetrain.schemes.dry_run import ScheduleError, Step, check_complete, replay
from pipetrain.schemes.policies import FlushPolicy
from pipetrain.schemes.schedules import Groups, Schedule
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import ASYNCHRONOUS, PIPELINES, chunked

_PLACE = re.compile(r"(.*\.py)(?::(.*))?", re.DOTALL)
GIVEN = frozenset(scheme.schedule for scheme in PIPELINES.values())
PARTS = ("forward", "backward", "predicts")  # of a policy


def is_place(text: str) -> bool:
    """Whether a text names something in a Python file, and so no scheme of the table."""
    return _PLACE.fullmatch(text) is not None


def scheme_at(text: str) -> Scheme:
    """The scheme that ``FILE.py:NAME`` names: a Scheme, a policy or its class, or a Schedule.

    A policy is read by the asynchronous order, and has the name of the scheme; a schedule is synchronous. The file is
    executed, once as long as it is not changed. Raises ValueError where there is no such thing.
    """
    match = _PLACE.fullmatch(text)
    assert match is not None  # see is_place
    path, name = Path(match[1]), match[2] or ""
    if not path.is_file():
        raise ValueError(f"There is no such file. Received: scheme={text!r}. Try one that exists, as in FILE.py:NAME.")
    return _found(path, path.resolve(), path.stat().st_mtime_ns, name)


@lru_cache(maxsize=64)
def _found(given: Path, path: Path, changed_ns: int, name: str) -> Scheme:
    """The scheme of this name; one that is asked for twice is the same one, as what is planned for it is kept."""
    module, text = _module(path, changed_ns), f"{given}:{name}" if name else str(given)
    if not hasattr(module, name):
        raise ValueError(f"The file has no such name. Received: scheme={text!r}. Try {_better(module, given, name)}.")
    return _scheme(getattr(module, name), name, text)


def _scheme(found: Any, name: str, text: str) -> Scheme:
    about = f"of {Path(text.rpartition(':')[0]).name}"
    if isinstance(found, type) and _is_policy(found):
        try:
            found = found()
        except TypeError as error:
            raise ValueError(
                f"The policy's class takes arguments. Received: scheme={text!r}, {error}. Try the name of an object."
            ) from error
    if isinstance(found, Scheme):
        return found
    if isinstance(found, Schedule):
        return Scheme(name, found, FlushPolicy(), f"synchronous, {about}", splits=True)
    if _is_policy(found):
        return Scheme(name, ASYNCHRONOUS, found, f"asynchronous, {about}")
    raise ValueError(
        f"What has this name is no scheme. Received: scheme={text!r}, a {type(found).__name__}. Try a Scheme, a "
        f"Schedule, or a policy, which has {', '.join(PARTS)}: docs/guide/extending.md shows them."
    )


@lru_cache(maxsize=32)
def _module(path: Path, changed_ns: int) -> ModuleType:
    """What the file defines."""
    about = importlib.util.spec_from_file_location(f"{path.stem} of --scheme", path)
    assert about is not None and about.loader is not None  # of a file in .py
    module = sys.modules[about.name] = importlib.util.module_from_spec(about)  # dataclasses look for it there
    try:
        about.loader.exec_module(module)
    except Exception as error:
        del sys.modules[about.name]
        raise ValueError(
            f"The file cannot be executed: {type(error).__name__}: {error}. Received: scheme={str(path)!r}. "
            f"Try python {path.name}."
        ) from error
    return module


def _better(module: ModuleType, path: Path, name: str) -> str:
    """Names that the file has: the one that is like this name, or all that may be schemes."""
    own = [each for each, value in vars(module).items() if _may_be_one(value, module) and not each.startswith("_")]
    near = difflib.get_close_matches(name, own, 1) or own
    return " or ".join(f"{path}:{each}" for each in near) or "a file that has a Scheme, a Schedule or a policy"


def _may_be_one(value: Any, module: ModuleType) -> bool:
    if isinstance(value, type):
        return value.__module__ == module.__name__ and _is_policy(value)
    return isinstance(value, Scheme) or (isinstance(value, Schedule) and value not in GIVEN) or _is_policy(value)


def _is_policy(value: Any) -> bool:
    return all(hasattr(value, part) for part in PARTS)


SUFFIX = ".csv"
Orders = tuple[tuple[Action, ...], ...]
_COMPOUND = re.compile(r"\((.*)\)OVERLAP_F_B")
_REDUCTION = re.compile(r"\d+REDUCE_GRAD")


def written(steps: Sequence[Step]) -> str:
    """The text of a dry run's steps, see ``dry_run.replay``."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [[str(each) if each else "" for each in row] for row in zip(*steps, strict=True)]
    )
    return text.getvalue()


def parsed(text: str) -> Orders:
    """Every device's actions. Raises ScheduleError, naming row and column, for a cell that is no action."""
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    orders = tuple(
        tuple(action for column, cell in enumerate(row) for action in _actions(cell.strip(), device, column))
        for device, row in enumerate(rows)
    )
    if not any(orders):
        raise ScheduleError(f"A schedule has a row of actions for each device. Received: {len(rows)} rows without any.")
    return orders


def _actions(cell: str, device: int, column: int) -> Iterator[Action]:
    compound = _COMPOUND.fullmatch(cell)
    for part in compound[1].split(";") if compound else [cell]:
        try:
            if part and not _REDUCTION.fullmatch(part):
                yield Action.parse(part.strip())
        except ValueError as error:
            raise ScheduleError(f"Row {device + 1}, column {column + 1}: {error}") from error


@dataclass(frozen=True)
class Written:
    """The order of a file, which is for so many devices and so many microbatches in a minibatch."""

    orders: Orders
    microbatches: int

    @property
    def stages(self) -> int:
        """On all devices together."""
        return 1 + max(action.stage for order in self.orders for action in order)

    def __call__(self, device: int, devices: int, groups: Groups) -> Iterator[Action]:
        """The actions of one device, see ``schedules.Order``."""
        for group in groups:
            if len(group) != self.microbatches or devices != len(self.orders):
                raise ScheduleError(
                    f"The schedule was written for {len(self.orders)} devices and {self.microbatches} microbatches. "
                    f"Received: {devices} devices, microbatches={len(group)}. "
                    f"Try stages={self.stages}, microbatches={self.microbatches}."
                )
            for op, stage, microbatch in self.orders[device]:
                yield Action(op, stage, group[microbatch])


@dataclass(frozen=True)
class FilePlacement:
    """Which device has a stage, where a file says it."""

    devices: tuple[int, ...]

    def __call__(self, stage: int, devices: int) -> int:
        """The device, see ``schedules.Schedule``; of more stages than there are in the file, any."""
        return self.devices[stage] if stage < len(self.devices) else stage % devices


def schedule_of(orders: Orders) -> Schedule:
    """The schedule that has these orders for a minibatch.

    Raises ScheduleError, naming the action, for orders that cannot run, and for devices with unlike numbers of stages.
    """
    every = [action for order in orders for action in order]
    stages, microbatches = 1 + max(each.stage for each in every), 1 + max(each.microbatch for each in every)
    check_complete(every, stages, microbatches)
    devices: dict[int, int] = {}
    for device, order in enumerate(orders):
        for action in order:
            if devices.setdefault(action.stage, device) != device:
                raise ScheduleError(
                    f"{action} stands in row {device + 1}, and other actions of stage {action.stage} in row "
                    f"{devices[action.stage] + 1}."
                )
    chunks, rest = divmod(stages, len(orders))
    mine = [sum(each == device for each in devices.values()) for device in range(len(orders))]
    if rest or {*mine} != {chunks}:
        raise ScheduleError(f"Every device has as many stages as the others. Received: rows with {mine} stages.")
    replay(orders, stages=stages)
    place = FilePlacement(tuple(devices[stage] for stage in range(stages)))
    return Schedule(Written(orders, microbatches), chunks=chunks, place=place)


def check_held(orders: Sequence[Sequence[Action]], most: int) -> None:
    """Raise ScheduleError, naming the action, where a device would hold more activations of a stage than ``most``."""
    for device, order in enumerate(orders):
        over = next((action for action, count in zip(order, held(order), strict=True) if count > most), None)
        if over is not None:
            raise ScheduleError(
                f"{over} needs more memory than there is: device {device} would hold the activations of {most + 1} "
                f"microbatches. Received: a limit of {most}. Try a limit of {max(held(order))}, or another schedule."
            )


def scheme_of(path: str | Path) -> Scheme:
    """The synchronous scheme of a schedule in a file, whose name it has.

    Raises OSError for a file that cannot be read, ScheduleError for one that holds no schedule.
    """
    try:
        schedule = schedule_of(parsed(Path(path).read_text(encoding="utf-8-sig")))
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path}: A schedule is text in UTF-8. Received: {error}.") from error
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    return Scheme(Path(path).name, schedule, FlushPolicy(), "synchronous, of a file", splits=True)


def chosen(scheme: str | Scheme, chunks: Any = None) -> str | Scheme:
    """What a user means by a scheme: that of a file where it names one, with so many stages on a device if given.

    Raises OSError, ScheduleError and ValueError as ``scheme_of``, ``scheme_at`` and ``table.chunked`` do.
    """
    if isinstance(scheme, str) and scheme.endswith(SUFFIX):
        scheme = scheme_of(scheme)
    elif isinstance(scheme, str) and is_place(scheme):
        scheme = scheme_at(scheme)
    return chunked(scheme, chunks)


def in_full(scheme: str) -> str | None:
    """How a file's scheme is named from any folder; None for a scheme that is not of a file."""
    if not scheme.endswith(SUFFIX) and not is_place(scheme):
        return None
    file, colon, name = scheme.rpartition(":") if is_place(scheme) else (scheme, "", "")
    return f"{Path(file).resolve()}{colon}{name}"


def stages_of(scheme: str | Scheme) -> int | None:
    """For how many stages a scheme was written; None where it is for any number."""
    order = scheme.schedule.order if isinstance(scheme, Scheme) else None
    return order.stages if isinstance(order, Written) else None


def microbatches_of(scheme: str | Scheme) -> int | None:
    """For how many microbatches a scheme was written; None where it is for any number."""
    order = scheme.schedule.order if isinstance(scheme, Scheme) else None
    return order.microbatches if isinstance(order, Written) else None
