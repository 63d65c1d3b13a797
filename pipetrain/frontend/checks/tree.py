"""Refuses trees of workers that cannot be, and devices that are too few for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipetrain.schemes.arguments import is_count
from pipetrain.schemes.coding.coded_reduce import Tree, checked_tree
from pipetrain.schemes.table import CODED


def check_tree(scheme: str, children: Any, depth: Any, stragglers: Any) -> None:
    """Refuse what is no tree, and a tree of another scheme."""
    given = {"children": children, "depth": depth, "stragglers": stragglers}
    if scheme == CODED:
        tree_of(children, depth, stragglers)
        return
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"Only {CODED} has a tree of workers. Received: {name}={value!r}, scheme={scheme!r}. "
                f"Try leaving it out, or scheme={CODED!r}."
            )


def tree_of(children: Any, depth: Any, stragglers: Any) -> Tree:
    """The tree of these arguments, by default of depth 1 with one straggler. Raises ValueError for what is none."""
    if children is None:
        raise ValueError(
            f"{CODED} needs to know how many children every parent has. Received: children=None. Try children=3."
        )
    return checked_tree(children, 1 if depth is None else depth, 1 if stragglers is None else stragglers)


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
