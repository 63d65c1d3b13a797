"""Checkpoints on disk: written whole or not at all, verified when read, the newest few kept."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ABOUT = "about"  # the array that holds everything but arrays, as JSON text
FORMAT = 1


class Checkpoint(NamedTuple):
    """What was read: arrays by name, and what is known beside them."""

    path: Path
    arrays: dict[str, np.ndarray]
    about: dict[str, Any]


class Store:
    """A directory of files ``step-00000200.npz``, NumPy's archives, whose parts carry checksums.

    A file is written under another name, flushed to the disk and then renamed: a process that is killed leaves the
    earlier ones as they were.

    Args:
        directory: made if need be.
        keep: how many of the newest files to keep.
    """

    def __init__(self, directory: str | Path, keep: int) -> None:
        self.directory, self._keep = Path(directory), keep

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

    def write(self, step: int, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> Path:
        """Write a checkpoint and remove those that are too many. Raises OSError; earlier ones are then as before."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._sweep()
        text = json.dumps({"format": FORMAT, "step": step, **about})
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
            part.unlink(missing_ok=True)
            raise
        _flush(self.directory)
        for old in self.paths()[: -self._keep]:
            old.unlink(missing_ok=True)
        return path

    def paths(self) -> list[Path]:
        """The checkpoints, the oldest first."""
        return sorted(self.directory.glob("step-*.npz"), key=lambda path: (len(path.name), path.name))

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and what is wrong with newer ones, which are set aside; None if none.

        Raises ValueError if there are checkpoints and none is whole.
        """
        damaged: list[str] = []
        bad: list[Path] = []
        for path in reversed(self.paths()):
            try:
                found = _read(path)
            except Exception as error:  # of many kinds: what is wrong may be any byte
                reason = str(error).split("\n")[0] or type(error).__name__
                damaged.append(f"{path.name} is damaged ({reason})")
                bad.append(path)
                continue
            for each in bad:  # or it would count as the newest of those to keep
                each.replace(each.with_suffix(".damaged"))
            return found, damaged
        if damaged:
            raise ValueError(
                f"No checkpoint can be read. Received: {str(self.directory)!r}, where {'; '.join(damaged)}. "
                "Try another directory, or delete this one to begin anew."
            )
        return None, []

    def _sweep(self) -> None:
        """Remove what processes that were killed left half written."""
        for part in self.directory.glob(".step-*.part"):
            part.unlink(missing_ok=True)


def _read(path: Path) -> Checkpoint:
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}  # reading compares the checksums
    about = json.loads(arrays.pop(ABOUT).tobytes())
    if about.get("format") != FORMAT:
        raise ValueError(f"format {about.get('format')!r} instead of {FORMAT}")
    return Checkpoint(path, arrays, about)


def _flush(directory: Path) -> None:
    """Make the renaming last, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
