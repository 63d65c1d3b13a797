"""The versions of one stage's weights that are held, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from pipetrain.schemes.policies import Policy, Read, newest


def _reads(policy: Policy, stage: int, stages: int, minibatch: int) -> tuple[Read, Read]:
    """Of F(minibatch) and of B(minibatch)."""
    return policy.forward(minibatch, stage, stages), policy.backward(minibatch, stage, stages)


class WeightVersions:
    """The versions of one stage's weights that some action still has to read.

    Weights may be anything: integers, arrays, tensors. ``newest(horizon)`` gives the newest version, moved that many
    updates ahead, which only the newest can be, for the velocity belongs to it; ``keep(horizon)`` gives it in a form
    that later updates leave alone. Memory: an old version is held only while an action will still read it, and a
    predicted one only if a later version's action reads it again. So weight stashing holds ``N-k-1`` besides the newest
    at stage k, ``2bw`` one, and vanilla and SpecTrain none.
    """

    def __init__(
        self, policy: Policy, stage: int, stages: int, newest: Callable[[int], Any], keep: Callable[[int], Any]
    ) -> None:
        self._place = stage, stages
        self._reads = lru_cache(maxsize=4 * stages)(partial(_reads, policy, stage, stages))  # they are asked for often
        self._newest, self._keep = newest, keep
        self._kept: dict[int, Any] = {}
        self._predicted: dict[int, Any] = {}  # by minibatch, for its backward
        self._next_forward = self._next_backward = 0
        self.version = 0

    def forward(self, minibatch: int) -> Any:
        """The weights of F(minibatch)."""
        self._next_forward = minibatch + 1
        read, again = self._reads(minibatch)
        if read.horizon and read.version < minibatch and read == again:
            self._predicted[minibatch] = self._keep(read.horizon)
            return self._predicted[minibatch]
        return self._resolve(read)

    def backward(self, minibatch: int) -> Any:
        """The weights of B(minibatch)."""
        self._next_backward = minibatch + 1
        if minibatch in self._predicted:
            return self._predicted.pop(minibatch)
        return self._resolve(self._reads(minibatch)[1])

    def lasts(self, minibatch: int) -> bool:
        """Whether B(minibatch) reads the same weights as F(minibatch), the newest both times."""
        forward, backward = self._reads(minibatch)
        return forward == backward

    def staleness(self, minibatch: int) -> int:
        """Updates between the version that F(minibatch) reads and the one that its gradient is applied to."""
        return minibatch - self._reads(minibatch)[0].version

    def before_update(self) -> None:
        """Call just before the weights change: keeps the newest if an action still reads it, forgets what none will."""
        read = self._reads(self._next_backward)[1]
        oldest = self.version + 1 if read.horizon else read.version  # what is predicted comes from the newest then
        if newest(self._next_forward, *self._place) > self.version:  # else the next forward is overdue: it drains
            oldest = min(oldest, self._reads(self._next_forward)[0].version)
        if self.version >= oldest:
            self._kept[self.version] = self._keep(0)
        if self._kept:
            self._kept = {version: weights for version, weights in self._kept.items() if version >= oldest}
        self.version += 1

    @property
    def old(self) -> set[int]:
        """Old versions that are held."""
        return set(self._kept)

    @property
    def kept(self) -> int:
        """Versions held besides the newest."""
        return len(self._kept) + len(self._predicted)

    def _resolve(self, read: Read) -> Any:
        return self._newest(read.horizon) if read.version == self.version else self._kept[read.version]
