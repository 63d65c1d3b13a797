"""Folders in the memory of a host, whose files survive the process that has written them, but not the host."""

from __future__ import annotations

import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")  # a file system in memory, on Linux
ENDED = "ended"  # a file in the folder of a run that needs it no longer
STALE_S = 3600.0  # a folder in which nothing was written for so long is removed
BEGUN, GIVEN_UP_S = ".tempstate", 60.0  # in names of files that TensorFlow writes; not written to for so long, never


def folder() -> Path | None:
    """This user's folder, which nobody else can read; None where there is no such file system or it is not private."""
    own = MEMORY / f"pipetrain-{os.getuid()}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        facts = own.lstat()
    except OSError:
        return None
    is_private = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not stat.S_IMODE(facts.st_mode) & 0o077
    return own if is_private else None


def sweep() -> None:
    """Remove the folders of runs that have ended, and of those that nobody has written to for ``STALE_S``.

    Of the others, what a process that was killed has left half written.
    """
    own = folder()
    for each in own.iterdir() if own else ():
        with suppress(OSError):
            if (each / ENDED).exists() or _age_s(each) > STALE_S:
                shutil.rmtree(each, ignore_errors=True)
                continue
            for part in each.glob(f"*{BEGUN}*"):
                if _age_s(part) > GIVEN_UP_S:
                    part.unlink()


def _age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime
