"""What determines the kernels that TensorFlow runs on this machine, on which a model's cost depends."""

from __future__ import annotations

import os
import platform

from pipetrain.compute.processor import described
from pipetrain.compute.tensorflow_private import is_deterministic

CHOOSING = ("TF_CUDNN_", "TF_DISABLE_", "TF_ENABLE_", "TF_XLA_", "XLA_", "ONEDNN_", "DNNL_")  # variables' first letters


def conditions() -> tuple[str, ...]:
    """The processor with its instruction sets, and the settings that switch kernels on or off."""
    chosen = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(CHOOSING))
    return platform.machine(), *described(), *chosen, f"deterministic={is_deterministic()}"
