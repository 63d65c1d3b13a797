"""A part of a core's time for a group of processes, by control groups of Linux (version 1 or 2); needs root."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOTS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")  # of version 1, where there is one, and of version 2
PERIOD_US = 2000  # in which a group has its part: short, since messages wait for the next one


def group(name: str, part: float, ends: ExitStack) -> Path:
    """A group that has so much of a core, and which ``ends`` removes: what ``joining`` takes."""
    root = next(each for each in ROOTS if each.exists())
    folder, quota_us = root / name, round(part * PERIOD_US)
    folder.mkdir()
    ends.callback(folder.rmdir)
    if root == ROOTS[0]:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="ascii")
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="ascii")
    else:
        (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}", encoding="ascii")
    return folder / "cgroup.procs"


def joining(members: Path | str | None, command: Sequence[str]) -> list[str]:
    """The command, run by a process that joins this group first, if there is one."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(members), *command] if members else [*command]
