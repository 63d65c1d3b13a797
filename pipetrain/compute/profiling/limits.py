"""How long profiling may take, and where on disk its results are kept."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from pipetrain.plan.choice import Choice

BUDGET_S = 20.0


class Budget:
    """A stopwatch that says whether there is time for more.

    Args:
        seconds: that all may take; None or infinity for as many as it takes.
        now_s: a clock, in seconds.

    ``is_short``: whether the answer has ever been no, so that something was left out.

    Raises:
        TypeError, ValueError: for what is no number of seconds above 0.
    """

    def __init__(self, seconds: float | None = None, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = checked_budget(seconds)
        self._now_s, self._start_s = now_s, now_s()
        self.is_short = False

    @property
    def spent_s(self) -> float:
        """Seconds since it was made."""
        return self._now_s() - self._start_s

    def has(self, part: float, needed_s: float = 0.0) -> bool:
        """Whether no more than this part of the seconds is over when something is done that takes ``needed_s``."""
        if self.spent_s + needed_s <= part * self.seconds:
            return True
        self.is_short = True
        return False


def checked_budget(budget_s: float | None) -> float:
    """The seconds, infinity for None. Raises TypeError or ValueError for what is no number of seconds above 0."""
    if budget_s is None:
        return math.inf
    try:
        if not isinstance(budget_s, bool) and float(budget_s) > 0:
            return float(budget_s)
    except (TypeError, ValueError):
        raise TypeError(
            f"A budget is a number of seconds. Received: budget_s={budget_s!r}. Try {BUDGET_S:g}, or None for no limit."
        ) from None
    raise ValueError(
        f"A profile takes some time. Received: budget_s={budget_s!r}. Try {BUDGET_S:g}, or None for no limit."
    )


NOWHERE = Path(os.devnull)  # below it nothing can be read or written


def folder() -> Path:
    """``$XDG_CACHE_HOME/pipetrain``, or ``~/.cache/pipetrain``; there need not be such a folder.

    Where the user has no home, what is read or written there is an OSError: nothing is kept, as on a full disk. A
    relative ``XDG_CACHE_HOME`` is ignored, as its standard says.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = _home() / ".cache"
    return (cache if cache.is_absolute() else NOWHERE) / "pipetrain"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and the system does not know the user: a container, a batch job
        return NOWHERE


Value = TypeVar("Value")


def kept_at(
    path: Path,
    value: Value,
    write: Callable[[Path], object],
    read: Callable[[Path], Value | None],
    replaces: bool = False,
) -> Value:
    """Write a value to a file; what is there then: of processes that write at the same time, the first one's.

    A file that cannot be written is no reason not to go on.

    Args:
        path: of the file.
        value: which is written.
        write: writes it to a file.
        read: what a file has, None for one that is not there or not whole.
        replaces: whether a whole file that is there is replaced.
    """
    part = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(part)
            return _placed(path, part, value, read, replaces)
        finally:
            part.unlink(missing_ok=True)
    return value


def _placed(path: Path, part: Path, value: Value, read: Callable[[Path], Value | None], replaces: bool) -> Value:
    """Give a file that was written its name, unless that of another process has it by now; what has the name."""
    try:
        if replaces:
            part.replace(path)
        else:
            path.hardlink_to(part)
    except OSError:  # it is there by now, or the file system has no links
        if (first := read(path)) is not None:
            return first
        part.replace(path)
    return value


class KeptValue(Generic[Value]):
    """What was measured and JSON holds, in the folder, known again by all on which it depends.

    Args:
        kind: with which its file's name begins.
        key: all on which it depends.
        checked: what JSON has read as the value. Raises TypeError, ValueError, IndexError for what is none.
    """

    def __init__(self, kind: str, key: Any, checked: Callable[[Any], Value]) -> None:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
        self._path, self._checked = folder() / f"{kind}-{digest}.json", checked

    def read(self) -> Value | None:
        """The value; None where it is not known."""
        return self._read(self._path)

    def keep(self, value: Value) -> Value:
        """Write it down; what is kept, which may be another process's by now."""
        text = json.dumps(value)
        return kept_at(self._path, value, lambda path: path.write_text(text, encoding="utf-8"), self._read)

    def _read(self, path: Path) -> Value | None:
        with suppress(OSError, TypeError, ValueError, IndexError):  # not there, or not whole
            return self._checked(json.loads(path.read_text(encoding="utf-8")))
        return None


class KeptTrials:
    """The trials of the ways among which a choice cannot tell the fastest.

    They are known again by what was predicted, to the last digit: by the very profile, that is. Links between processes
    are measured by every program, so there they are not.

    Args:
        choice: with these ways.
        within: all else on which their seconds depend.

    ``seconds`` of a minibatch of each way, empty where they are not known.
    """

    def __init__(self, choice: Choice, within: Sequence[Any]) -> None:
        ways = [(sorted(way.told.items()), way.step_s, way.memory_bytes) for way in choice.near]

        def checked(found: Any) -> list[float]:
            seconds = [float(each) for each in found]
            if len(seconds) != len(ways):
                raise ValueError(found)
            return seconds

        self._kept = KeptValue("trials", (choice.batch_size, ways, within), checked)
        self.seconds = self._kept.read() or []

    def keep(self, seconds: Sequence[float]) -> None:
        """Write them down."""
        self._kept.keep([*seconds])
