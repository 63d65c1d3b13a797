"""What the processor can do, and oneDNN's kernels, on where TensorFlow's default leaves fused multiply-adds unused.

TensorFlow's own kernels for x86 are built without them. Its oneDNN kernels have them; TensorFlow takes these by default
only on processors with one of ``BY_DEFAULT``, and reads the variable ``TF_ENABLE_ONEDNN_OPTS`` when it is loaded.
"""

from __future__ import annotations

import os
import platform
import sys
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


VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
BY_DEFAULT = frozenset({"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"})
_came_late = False


def switch_on() -> None:
    """Set the variable where that serves, unless it is set or TensorFlow is loaded already."""
    global _came_late
    if VARIABLE in os.environ or not _serves():
        return
    if "tensorflow" in sys.modules:
        _came_late = True
    else:
        os.environ[VARIABLE] = "1"


def left_out() -> str:
    """What a TensorFlow that was loaded too early leaves unused, and the remedy; empty if it leaves nothing."""
    if not _came_late:
        return ""
    return (
        "TensorFlow was loaded before pipetrain and runs without oneDNN's kernels, the only ones that use this "
        f"processor's fused multiply-adds. Import pipetrain before tensorflow and keras, or set {VARIABLE}=1."
    )


def _serves() -> bool:
    available = instructions()
    return "fma" in available and not available & BY_DEFAULT
