"""What weights that several blocks have change in the cost of a stage: it holds one copy, and sends their sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipetrain.plan.profile import BlockProfile

Floats = NDArray[np.float64]


class SharingCosts:
    """Of every stage of blocks i to j-1, by two indices i and j, shape (blocks + 1, blocks + 1).

    ``repeated_bytes`` are the weights that its blocks count more than once, ``repeated_part`` what this is of the
    updates' seconds, given each block's; ``shared_bytes`` the weights that blocks outside of it have too.
    """

    def __init__(self, blocks: Sequence[BlockProfile]) -> None:
        users: defaultdict[int, list[int]] = defaultdict(list)
        size_bytes: dict[int, int] = {}
        for n, block in enumerate(blocks):
            for number, each_bytes in block.shared:
                users[number].append(n)
                size_bytes[number] = each_bytes
        together: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for number, using in users.items():
            together[tuple(using)] += size_bytes[number]
        self._blocks, self._together = blocks, dict(together)
        shape = (len(blocks) + 1, len(blocks) + 1)
        self.repeated_bytes, self.shared_bytes = np.zeros(shape), np.zeros(shape)
        for places, each_bytes in together.items():
            inside = self._inside(places)
            self.repeated_bytes += each_bytes * np.maximum(inside - 1, 0)
            self.shared_bytes += each_bytes * ((inside > 0) & (inside < len(places)))

    def repeated_s(self, update_s: Sequence[float]) -> Floats:
        """The seconds of updates that blocks i to j-1 count more than once, from those of every block."""
        seconds = np.zeros_like(self.repeated_bytes)
        for places, each_bytes in self._together.items():
            parts = [update_s[n] * each_bytes / max(self._blocks[n].weight_bytes, 1) for n in places]
            seconds += float(np.mean(parts)) * np.maximum(self._inside(places) - 1, 0)
        return seconds

    def _inside(self, places: Sequence[int]) -> NDArray[np.int64]:
        """How many of these blocks are among blocks i to j-1."""
        before = np.searchsorted(np.asarray(places), np.arange(len(self._blocks) + 1))
        inside: NDArray[np.int64] = np.maximum(before[None, :] - before[:, None], 0)
        return inside
