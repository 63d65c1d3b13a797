"""Checkpoints on disk: written whole or not at all, verified when read, the newest few kept."""

from __future__ import annotations

import json
import os
import re
import tempfile
import uuid
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipetrain.checkpoint import shards
from pipetrain.checkpoint.shards import Shard


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
    if not why and isinstance(error, OSError) and error.filename is not None:  # one of its shards
        why = f"{Path(str(error.filename)).name}: {error.strerror}"
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
        shards.read_through(path)
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


ABOUT = "about"  # the array that holds everything but arrays, as JSON text
WHOLE, FORMAT = 2, 3  # of one file, and of one with shards; 1 has nothing in flight, and all are read
NAME = re.compile(r"step-(\d{8,})\.npz")  # of what a store writes; what else begins so is the user's


class Checkpoint(NamedTuple):
    """What was read: arrays by name, and what is known beside them."""

    path: Path
    arrays: dict[str, np.ndarray]
    about: dict[str, Any]


class Store:
    """A directory of files ``step-00000200.npz``, NumPy's archives, whose parts carry checksums.

    A file may name shards, which workers have written before it into the same directory, ``step-00000200-...``. They
    are removed with the last file that names them, and a checkpoint with a damaged one is damaged.

    A file is written under another name, flushed to the disk and then renamed: a process that is killed leaves the
    earlier ones as they were. Each says of which step and of which run it is, whatever its name, its date, or the
    directory that it was copied to. Copies under other names, such as ``step-best.npz``, are read if they are newer,
    and never removed.

    Args:
        directory: made if need be.
        keep: how many of the newest files to keep.

    ``run`` names the run whose files are written: a new one, or that of the newest file that was read.
    """

    def __init__(self, directory: str | Path, keep: int) -> None:
        self.directory, self._keep = Path(directory), keep
        self.run = uuid.uuid4().hex
        self._steps: dict[Path, int] = {}  # of the files of this run
        self._shards: dict[Path, list[Shard]] = {}  # that those name

    def check(self) -> None:
        """Raise ValueError if nothing can be written there."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            raise ValueError(
                f"Checkpoints cannot be written there: {error.strerror}. Received: directory={str(self.directory)!r}. "
                "Try another one."
            ) from error

    def write(
        self, step: int, arrays: dict[str, np.ndarray], about: dict[str, Any], named: Sequence[Shard] = ()
    ) -> Path:
        """Write a checkpoint and remove those that are too many. Raises OSError; earlier ones are then as before.

        ``named`` are its shards, which are there.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        known = {"format": FORMAT, "shards": [each._asdict() for each in named]} if named else {"format": WHOLE}
        text = json.dumps({**known, "run": self.run, "step": step, "arrays": len(arrays), **about})
        parts: dict[str, Any] = {ABOUT: np.frombuffer(text.encode(), dtype=np.uint8), **arrays}
        path = self.directory / f"step-{step:08}.npz"
        part = self.directory / f".{path.name}.{os.getpid()}.part"
        try:
            with part.open("wb") as file:
                np.savez(file, **parts)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            with suppress(OSError):  # its directory may be gone
                part.unlink()
            raise
        _flush(self.directory)
        self._steps[path] = step
        gone = self._shards.pop(path, [])  # of a file of this step that there was before
        self._shards[path] = list(named)
        for old in self._in_order()[: -self._keep]:
            with suppress(OSError):
                old.unlink(missing_ok=True)
            del self._steps[old]
            gone += self._shards.pop(old, [])
        self._remove(gone)
        return path

    def _remove(self, gone: Sequence[Shard]) -> None:
        """Remove these shards, unless a copy of a file that has been removed names them."""
        if gone:  # else other files need not be read
            with suppress(ValueError):  # the directory cannot be listed
                used = _names_in(path for path in self.paths() if path not in self._steps)
                for each in gone:
                    if each.name not in used:
                        shards.remove(self.directory / each.name)

    def paths(self) -> list[Path]:
        """Whatever looks like a checkpoint, by name. Raises ValueError if the directory cannot be read."""
        try:
            names = os.listdir(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ValueError(
                f"The directory of checkpoints cannot be read: {error.strerror}. Received: "
                f"directory={str(self.directory)!r}. Try again when it can be, or another directory."
            ) from error
        found = [self.directory / name for name in names if name.startswith("step-") and name.endswith(".npz")]
        return sorted(found, key=lambda path: (len(path.name), path.name))

    def last(self) -> Path | None:
        """The newest file of this run that has been read or written here."""
        return next(reversed(self._in_order()), None)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and what is wrong with newer ones, which are set aside; None if none.

        Raises ValueError if there are checkpoints and none is whole, if a newer one than it cannot be read for another
        reason than damage, and if there are those of several runs.
        """
        whole, bad = self._looked_through()
        runs = {each.run: each.path.name for each in whole if each.run is not None}
        if len(runs) > 1:
            raise ValueError(
                f"There are checkpoints of several runs. Received: directory={str(self.directory)!r}, with "
                f"{' and '.join(runs.values())}. Try to move those of one run to another directory."
            )
        found = None
        for entry in reversed(whole):
            try:
                found = read(entry.path)
                break
            except Exception as error:
                bad.append(unreadable(entry.path, _numbered(entry.path), error))
        step = -1 if found is None else found.about["step"]
        newer = [each for each in bad if found is None or each.step >= step]
        self._check(newer, found)
        if found is not None:
            self.run = found.about.get("run", self.run)
            for each in newer:  # or they would come first for ever
                with suppress(OSError):
                    each.path.replace(each.path.with_suffix(".damaged"))
        gone = {each.path for each in bad}
        mine = [each for each in whole if each.is_named and each.path not in gone]
        self._steps, self._shards = {each.path: each.step for each in mine}, {each.path: each.shards for each in mine}
        return found, [f"{each.path.name} is damaged ({each.why})" for each in newer]

    def sweep(self) -> None:
        """Remove what processes that were killed left half written; for the only one that writes there."""
        for pattern in (".step-*.part", ".probe-*"):
            for part in self.directory.glob(pattern):
                with suppress(OSError):
                    part.unlink()
        names = {each.partition(".")[0] for each in os.listdir(self.directory)}
        found = [match for each in names if (match := shards.NAME.fullmatch(each))]
        used = _names_in(self.paths()) if found else set()
        for name, of in ((each[0], each[1]) for each in found):
            files = [self.directory / f"{of}{ending}" for ending in (".npz", ".damaged")]
            if name not in used and not any(map(os.path.lexists, files)):  # a file that cannot be read may name it
                shards.remove(self.directory / name)

    def _in_order(self) -> list[Path]:
        return sorted(self._steps, key=lambda path: self._steps[path])

    def _looked_through(self) -> tuple[list[_Entry], list[Unreadable]]:
        """What the files say of themselves, the newest last, and those that say nothing."""
        whole, bad = [], []
        for path in filter(os.path.lexists, self.paths()):  # or whoever wrote it has removed it
            try:
                about = _about(path)
                is_named, named = _numbered(path) == about["step"], shards.shards_of(about)
                whole.append(_Entry(about["step"], is_named, path, about.get("run"), named))
            except Exception as error:  # of many kinds: what is wrong may be any byte
                bad.append(unreadable(path, _numbered(path), error))
        return sorted(whole), bad

    def _check(self, newer: Sequence[Unreadable], found: Checkpoint | None) -> None:
        """Raise ValueError where these are not simply damaged, or nothing else is there."""
        for each in newer:
            if not each.is_damaged:
                aside = f"move it elsewhere to go on from {found.path.name}" if found else "another directory"
                raise ValueError(
                    f"The newest checkpoint cannot be read: {each.why}. Received: {str(each.path)!r}. "
                    f"Try {each.remedy}, or {aside}."
                )
        if newer and found is None:
            damaged = "; ".join(f"{each.path.name} is damaged ({each.why})" for each in newer)
            raise ValueError(
                f"No checkpoint can be read. Received: {str(self.directory)!r}, where {damaged}. "
                "Try another directory, or delete this one to begin anew."
            )


class _Entry(NamedTuple):
    """A file, in the order in which they are newer; of two of a step, that which has the store's own name."""

    step: int
    is_named: bool
    path: Path
    run: str | None
    shards: list[Shard]


def _names_in(paths: Iterable[Path]) -> set[str]:
    """The shards that these files name, as far as they can be read."""
    found = set()
    for path in paths:
        with suppress(Exception):  # of many kinds: what is wrong may be any byte
            found |= {each.name for each in shards.shards_of(_about(path))}
    return found


def steps_done(directory: Path) -> int | None:
    """The step of the newest checkpoint there, of files that cannot be read that by the name; None if there is none."""
    steps = []
    for path in Store(directory, 1).paths():
        try:
            steps.append(int(_about(path)["step"]))
        except Exception:  # it may be damaged, or have been removed meanwhile
            steps.append(_numbered(path))
    return max((each for each in steps if each >= 0), default=None)


def _numbered(path: Path) -> int:
    """The step that the file's name says; -1 if it is not a store's."""
    name = NAME.fullmatch(path.name)
    return int(name[1]) if name else -1


def _about(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as archive:
        return _checked(archive)


def read(path: Path) -> Checkpoint:
    """A checkpoint with the arrays of its shards. Raises whatever is wrong with it."""
    with np.load(path, allow_pickle=False) as archive:
        about = _checked(archive)
        arrays = {name: archive[name] for name in archive.files if name != ABOUT}  # reading compares the checksums
    if len(arrays) != about.get("arrays", len(arrays)):  # which the archive's directory has, whose bytes have none
        raise ValueError(f"{len(arrays)} of its {about['arrays']} arrays are there")
    for each in shards.shards_of(about):
        from pipetrain.checkpoint import bundles  # TensorFlow, which who only looks at steps does not need

        arrays |= bundles.read(path.with_name(each.name), each)
    return Checkpoint(path, arrays, about)


def _checked(archive: Any) -> dict[str, Any]:
    """What a file says of itself. Raises Other for what no checkpoint of this version says."""
    about = json.loads(archive[ABOUT].tobytes()) if ABOUT in archive.files else {}
    given = about.get("format") if isinstance(about, dict) else None
    if isinstance(given, int) and given > FORMAT:
        raise Other(f"it has format {given}, of a newer version of pipetrain; this one reads {FORMAT}", "that version")
    if given not in range(1, FORMAT + 1) or not isinstance(about.get("step"), int):
        raise Other("it is no checkpoint of pipetrain", "renaming it")
    return dict(about)


def _flush(directory: Path) -> None:
    """Make the renaming last, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        with suppress(OSError):  # some file systems cannot, or the directory is gone
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
