"""What the processor can do."""

from __future__ import annotations

import platform
from pathlib import Path

PATH = Path("/proc/cpuinfo")  # on Linux


def described() -> list[str]:
    """Its name and its instruction sets, as lines of text."""
    return sorted({line for line in _lines() if line.startswith(("model name", "flags", "Features"))}) or [
        platform.processor()
    ]


def instructions() -> frozenset[str]:
    """The names of its instruction sets, as Linux has them; empty on other systems."""
    return frozenset(name for line in _lines() if line.startswith("flags") for name in line.partition(":")[2].split())


def _lines() -> list[str]:
    try:
        return PATH.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
