"""Refuses devices that a strategy does not reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipetrain.compute.cores import is_remote


def check_local(devices: Sequence[str]) -> None:
    """Refuse devices of other processes, which MirroredStrategy does not reach."""
    if any(map(is_remote, devices)):
        raise ValueError(
            f"data-parallel has its copies on this process's devices. Received: devices={[*devices]}. "
            "Try scheme='all-reduce', which reaches other hosts."
        )


def check_remembered(memories: Sequence[Any], devices: int) -> None:
    """Refuse recurrent layers that remember the rows of a whole minibatch, of which each device has a part."""
    if memories and devices > 1:
        raise ValueError(
            "A stateful recurrent layer remembers the rows of a whole minibatch. Received: scheme='data-parallel' with "
            f"{devices} devices, and a model with such a layer. Try scheme='all-reduce', or stateful=False."
        )
