"""A part of a core's time for a group of processes, by Linux's control groups; needs root.

Of version 1, or of version 2 where its controller ``cpu`` is on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOTS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")  # of version 1, where there is one, and of version 2
PERIOD_US = 2000  # in which a group has its part: short, since messages wait for the next one
LEAST_US = 1000  # that Linux lets a part be


def group(name: str, part: float, ends: ExitStack) -> Path:
    """A group that has so much of a core, and which ``ends`` removes: what ``joining`` takes."""
    root = next(each for each in ROOTS if each.exists())
    folder, period_us = root / name, max(PERIOD_US, math.ceil(LEAST_US / part))
    quota_us = round(part * period_us)
    folder.mkdir()
    ends.callback(folder.rmdir)
    if root == ROOTS[0]:
        (folder / "cpu.cfs_period_us").write_text(str(period_us), encoding="ascii")
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="ascii")
    else:
        (folder / "cpu.max").write_text(f"{quota_us} {period_us}", encoding="ascii")
    return folder / "cgroup.procs"


def joining(members: Path | None, command: Sequence[str]) -> list[str]:
    """The command, run by a process that joins this group first, if there is one."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(members), *command] if members else [*command]
