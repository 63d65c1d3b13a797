"""Refuses devices that a strategy does not reach."""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.compute.cores import is_remote


def check_local(devices: Sequence[str]) -> None:
    """Refuse devices of other processes, which MirroredStrategy does not reach."""
    if any(map(is_remote, devices)):
        raise ValueError(
            f"data-parallel has its copies on this process's devices. Received: devices={[*devices]}. "
            "Try a pipeline with replicas, or TensorFlow's MultiWorkerMirroredStrategy."
        )
