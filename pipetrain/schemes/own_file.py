"""A scheme of one's own in a Python file, named as in ``my_policy.py:MyPolicy``."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pipetrain.schemes.policies import FlushPolicy
from pipetrain.schemes.schedules import Schedule
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import ASYNCHRONOUS, PIPELINES

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
            f"The file cannot be executed: {type(error).__name__}: {error}. Received: {str(path)!r}. "
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
