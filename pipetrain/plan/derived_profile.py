"""Profiles made from measured ones: in fewer blocks, or in another number of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
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


def divided(whole: Profile, pieces: Profile | None, microbatches: int) -> Profile:
    """An estimate of the profile in so many microbatches; what is measured stays as it is.

    What a block takes is ``a + b * microbatches``: a part that goes with the rows, and one that every microbatch takes
    whatever its rows are, such as reading the weights. Both profiles together give a and b of every block; b is at
    least 0 for more microbatches than ``pieces`` has. Without ``pieces``, or where these are whole minibatches too, b
    is taken to be 0.
    """
    if pieces is None or pieces.microbatches == 1 or microbatches == 1:
        return replace(whole, microbatches=microbatches)
    part = (microbatches - 1) / (pieces.microbatches - 1)

    def between(first_s: float, last_s: float) -> float:
        """The time in between, or beyond."""
        return first_s + (part if last_s > first_s else min(part, 1.0)) * (last_s - first_s)

    def seconds(first: Seconds, last: Seconds) -> Seconds:
        forward_s, backward_s = between(first.forward_s, last.forward_s), between(first.backward_s, last.backward_s)
        return Seconds(forward_s, backward_s, last.update_s)

    def block(first: BlockProfile, last: BlockProfile) -> BlockProfile:
        plain = seconds(first.seconds, last.seconds)
        compiled = seconds(first.compiled, last.compiled) if first.compiled and last.compiled else last.compiled
        return replace(last, forward_s=plain.forward_s, backward_s=plain.backward_s, compiled=compiled)

    blocks = tuple(block(*both) for both in zip(whole.blocks, pieces.blocks, strict=True))
    loss_s = between(whole.loss_s, pieces.loss_s)
    return replace(pieces, blocks=blocks, loss_s=loss_s, microbatches=microbatches)


def undisturbed(whole: Profile, pieces: Profile | None) -> Profile:
    """The profile of whole minibatches, no block of which takes longer than in microbatches, as far as that is known.

    Fewer calls for the same rows take no longer: if they seem to, other programs had the processor meanwhile.
    """
    if pieces is None or pieces.microbatches == 1:
        return whole

    def less(a: Seconds, b: Seconds) -> Seconds:
        return Seconds(min(a.forward_s, b.forward_s), min(a.backward_s, b.backward_s), min(a.update_s, b.update_s))

    def block(own: BlockProfile, other: BlockProfile) -> BlockProfile:
        plain = less(own.seconds, other.seconds)
        compiled = less(own.compiled, other.compiled) if own.compiled and other.compiled else own.compiled
        return replace(own, **asdict(plain), compiled=compiled)

    blocks = tuple(block(*both) for both in zip(whole.blocks, pieces.blocks, strict=True))
    return replace(whole, blocks=blocks, loss_s=min(whole.loss_s, pieces.loss_s))
