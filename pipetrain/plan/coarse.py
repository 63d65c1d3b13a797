"""A profile in fewer blocks, for comparing many ways to cut a long chain in little time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pipetrain.plan.profile import BlockProfile, Profile, Seconds

SUMMED = ("forward_s", "backward_s", "weight_bytes", "activation_bytes", "update_s", "product_bytes", "fixed_bytes")
LARGEST = ("workspace_bytes", "row_workspace_bytes")  # blocks work one after another


def even_bounds(seconds: Sequence[float], most: int) -> list[int]:
    """Where to divide a chain into at most so many parts that take about equally long: 0, ..., the chain's length.

    Everything is a part of its own where there are no more.
    """
    count = len(seconds)
    if count <= most:
        return list(range(count + 1))
    ends_s = np.cumsum(seconds)
    wanted = np.searchsorted(ends_s, ends_s[-1] * np.arange(1, most) / most, side="right")
    return [0, *sorted({int(end) for end in wanted} - {0, count}), count]


def bounds_of(profile: Profile, most: int) -> list[int]:
    """``even_bounds`` of its blocks; every block is a part of its own where blocks share weights."""
    if any(block.shared for block in profile.blocks):
        return list(range(len(profile.blocks) + 1))
    return even_bounds([block.seconds.total_s for block in profile.blocks], most)


def merged(profile: Profile, bounds: Sequence[int]) -> Profile:
    """The profile with the blocks between two bounds together, named as the last of them: its cuts are the chain's."""
    parts = (profile.blocks[first:last] for first, last in pairwise(bounds))
    return replace(profile, blocks=tuple(part[0] if len(part) == 1 else _together(part) for part in parts))


def _together(blocks: Sequence[BlockProfile]) -> BlockProfile:
    sums = {name: sum(getattr(block, name) for block in blocks) for name in SUMMED}
    largest = {name: max(getattr(block, name) for block in blocks) for name in LARGEST}
    compiled = [block.compiled for block in blocks if block.compiled is not None]
    late = [block.late_bytes for block in blocks if block.late_bytes is not None]
    return replace(
        blocks[-1],
        **sums,
        **largest,
        compiled=Seconds(*map(sum, zip(*map(_seconds, compiled), strict=True)))
        if len(compiled) == len(blocks)
        else None,
        late_bytes=sum(late) if len(late) == len(blocks) else None,
    )


def _seconds(each: Seconds) -> tuple[float, float, float]:
    return each.forward_s, each.backward_s, each.update_s
