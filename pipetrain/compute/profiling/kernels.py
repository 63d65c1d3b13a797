"""What determines the kernels that TensorFlow runs on this machine, on which a model's cost depends."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CHOOSING = ("TF_CUDNN_", "TF_DISABLE_", "TF_ENABLE_", "TF_XLA_", "XLA_", "ONEDNN_", "DNNL_")  # variables' first letters
PROCESSOR = Path("/proc/cpuinfo")  # on Linux


def kernels() -> tuple[str, ...]:
    """The processor with its instruction sets, and the environment variables that switch kernels on or off."""
    chosen = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(CHOOSING))
    return platform.machine(), *_instructions(), *chosen


def _instructions() -> list[str]:
    try:
        lines = PROCESSOR.read_text(encoding="utf-8").splitlines()
    except OSError:
        return [platform.processor()]
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
