"""Refuses devices that are too few for a tree of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipetrain.schemes.arguments import is_count
from pipetrain.schemes.coding.coded_reduce import Tree


def check_workers(tree: Tree, stages: Any, devices: Sequence[str]) -> None:
    """Refuse fewer devices than workers, and another number of ``stages``, which would be that of the workers."""
    about = f"children={tree.children}, depth={tree.depth}"
    if stages is not None and (not is_count(stages) or stages != tree.workers):
        raise ValueError(
            f"The tree has {tree.workers} workers, each on a device. Received: stages={stages!r}, {about}. "
            "Try leaving stages out."
        )
    if len(devices) < tree.workers:
        raise ValueError(
            f"The tree has {tree.workers} workers, each on a device. Received: {len(devices)} devices, {about}. "
            f"Try pipetrain.set_cpu_devices({tree.workers}), or as many workers in pipetrain.connect."
        )
