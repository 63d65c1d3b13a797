"""Schedules of v stages on each device, the stages d, d + p, d + 2p, ... on device d: the bubble is a v-th.

Interleaved 1F1B with two devices, four stages and four microbatches, one column a unit of time::

    0: 0F0  0F1  2F0  2F1  0F2  2B0  0F3  2B1  2F2  0B0  2F3  0B1  .    2B2  .    2B3  0B2  0B3
    1: .    1F0  1F1  3F0  3B0  3F1  3B1  1F2  1B0  1F3  1B1  3F2  3B2  3F3  3B3  1B2  1B3  .

Looped breadth first with the same::

    0: 0F0  0F1  0F2  0F3  2F0  2F1  2F2  2F3  .    .    2B0  2B1  2B2  2B3  0B0  0B1  0B2  0B3
    1: .    1F0  1F1  1F2  1F3  3F0  3F1  3F2  3F3  3B0  3B1  3B2  3B3  1B0  1B1  1B2  1B3  .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, zip_longest

from pipetrain.schemes.actions import Action
from pipetrain.schemes.schedules import Groups, Schedule, one_forward_one_backward
from pipetrain.schemes.splitting import rows_of


@lru_cache
def interleaved(chunks: int) -> Schedule:
    """Interleaved 1F1B: each device has ``chunks`` stages, and takes p microbatches through one before the next.

    Bubble ``(p-1)/(v m)``, for m a multiple of p; the first device holds ``v p + p - 1`` activations of a stage. With
    one stage a device it is ``1f1b``. Microbatches are divided into rounds of p, or a few more where m is no multiple.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, figure 4.
    """
    if chunks == 1:
        return Schedule(one_forward_one_backward)
    return Schedule(partial(_interleaved, chunks), chunks=chunks)


@lru_cache
def looped_bfs(chunks: int) -> Schedule:
    """All microbatches go through one stage of the device before the next; backwards likewise, the last stage first.

    Bubble ``(p-1)/(v m)``, for m from p up; every device holds ``v m`` activations of a stage.

    Source: Lamy-Poirier 2022, Breadth-First Pipeline Parallelism (arXiv 2211.05953), section 4.1.
    """
    return Schedule(partial(_breadth_first, chunks), chunks=chunks)


def _interleaved(chunks: int, device: int, devices: int, groups: Groups) -> Iterator[Action]:
    stages = range(device, chunks * devices, devices)
    for group in groups:
        rounds = max(1, len(group) // devices)
        pieces = [[group[m] for m in rows_of(len(group), each, rounds)] for each in range(rounds)]
        forwards = [Action("F", stage, m) for piece in pieces for stage in stages for m in piece]
        backwards = [Action("B", stage, m) for piece in pieces for stage in reversed(stages) for m in piece]
        warm_up = (chunks - 1) * max(map(len, pieces)) + 2 * (devices - 1 - device)
        yield from _in_turns(forwards, backwards, warm_up)


def _in_turns(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Iterator[Action]:
    """So many forwards, then a forward and a backward in turn, then the backwards that are left."""
    yield from forwards[:warm_up]
    pairs = zip_longest(forwards[warm_up:], backwards)
    yield from (action for action in chain.from_iterable(pairs) if action is not None)


def _breadth_first(chunks: int, device: int, devices: int, groups: Groups) -> Iterator[Action]:
    stages = range(device, chunks * devices, devices)
    for group in groups:
        yield from (Action("F", stage, microbatch) for stage in stages for microbatch in group)
        yield from (Action("B", stage, microbatch) for stage in reversed(stages) for microbatch in group)
