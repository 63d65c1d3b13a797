"""Files that should be checkpoints and cannot be read: damaged ones, and those that may be whole."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import NamedTuple

READ_BYTES = 1 << 22  # at a time


class Other(ValueError):
    """A file that says what no checkpoint of this version says; ``remedy`` is what to try."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


class Unreadable(NamedTuple):
    """A file, the step by its name (-1 if that does not say), and why it cannot be read.

    ``is_damaged`` if that lies in its bytes; otherwise it may be read another time, or by another version: ``remedy``.
    """

    path: Path
    step: int
    why: str
    is_damaged: bool
    remedy: str = ""


def unreadable(path: Path, step: int, error: Exception) -> Unreadable:
    """What an exception says of a file that it came from."""
    why = _refused(path)
    if why:
        return Unreadable(path, step, why, is_damaged=False, remedy="again when it can be read")
    if isinstance(error, Other | MemoryError) and _is_whole(path):
        if isinstance(error, Other):
            return Unreadable(path, step, str(error), is_damaged=False, remedy=error.remedy)
        return Unreadable(path, step, "there is not enough memory", is_damaged=False, remedy="more memory")
    return Unreadable(path, step, str(error).split("\n")[0] or type(error).__name__, is_damaged=True)


def _refused(path: Path) -> str:
    """Why the system does not give the file's bytes; empty if it does."""
    try:
        with path.open("rb") as file:
            while file.read(READ_BYTES):
                pass
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _is_whole(path: Path) -> bool:
    """Whether every part of an archive has its checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # of many kinds: what is wrong may be any byte
        return False
