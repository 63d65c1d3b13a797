"""Which weights each forward and backward reads: a version of the stage's weights, and how far to predict from it.

``W_k[v]`` are stage k's weights after v updates; N stages, k = 0 ... N-1; minibatch i's backward makes
``W_k[i+1]``. A policy answers two questions with plain numbers, whatever the weights are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol


class Read(NamedTuple):
    """Read version ``version``, moved ``horizon`` updates ahead along the velocity."""

    version: int
    horizon: int = 0


class Policy(Protocol):
    """The weights of F(i) and of B(i) at stage k of N."""

    predicts: bool

    def forward(self, minibatch: int, stage: int, stages: int) -> Read: ...

    def backward(self, minibatch: int, stage: int, stages: int) -> Read: ...


def newest(minibatch: int, stage: int, stages: int) -> int:
    """The updates that stage k has done just before F(i): ``v_F = max(0, i - (N-1-k))``."""
    return max(0, minibatch - (stages - 1 - stage))


class Vanilla:
    """Whatever is newest: F(i) reads ``W[v_F]``, B(i) reads ``W[i]`` with the activations that F stored."""

    predicts = False

    def forward(self, minibatch: int, stage: int, stages: int) -> Read:
        return Read(newest(minibatch, stage, stages))

    def backward(self, minibatch: int, stage: int, stages: int) -> Read:
        return Read(minibatch)


class WeightStashing:
    """B(i) reads the version that F(i) read: ``W[v_F]`` for both (PipeDream, arXiv 1806.03377)."""

    predicts = False

    def forward(self, minibatch: int, stage: int, stages: int) -> Read:
        return Read(newest(minibatch, stage, stages))

    def backward(self, minibatch: int, stage: int, stages: int) -> Read:
        return self.forward(minibatch, stage, stages)


class VerticalSync:
    """One version per minibatch at every stage: ``W[max(0, i-(N-1))]`` for both (PipeDream)."""

    predicts = False

    def forward(self, minibatch: int, stage: int, stages: int) -> Read:
        return Read(newest(minibatch, 0, stages))

    def backward(self, minibatch: int, stage: int, stages: int) -> Read:
        return self.forward(minibatch, stage, stages)


class SpecTrain:
    """Predicted weights: what the newest version will be when the minibatch's round trip ends.

    ``s = min(i, N-1-k) + floor(k/2)`` from version ``v_F`` in F(i); ``s = floor(k/2)`` from version ``i`` in
    B(i). In steady state these are the paper's ``floor(k/2) + N-k-1`` and ``floor(k/2)``; the minimum is the
    ramp-up after a start or a drain, where fewer updates lie ahead. Source: arXiv 1809.02839, equations 4-6.
    """

    predicts = True

    def forward(self, minibatch: int, stage: int, stages: int) -> Read:
        ahead = min(minibatch, stages - 1 - stage) + stage // 2
        return Read(newest(minibatch, stage, stages), ahead)

    def backward(self, minibatch: int, stage: int, stages: int) -> Read:
        return Read(minibatch, stage // 2)


class LocalSpecTrain:
    """Predicted weights as of the minibatch's own backward here, which reads the very same.

    ``s = min(i, N-1-k)`` from version ``v_F``, for both. Memory: at stage k < N-1, one predicted copy for each of the
    N-k minibatches in flight. Sources: the SpecTrain authors' second version; PipeOptim (arXiv 2312.00839).
    """

    predicts = True

    def forward(self, minibatch: int, stage: int, stages: int) -> Read:
        return Read(newest(minibatch, stage, stages), min(minibatch, stages - 1 - stage))

    def backward(self, minibatch: int, stage: int, stages: int) -> Read:
        return self.forward(minibatch, stage, stages)


class TwoVersions:
    """One version per minibatch at every stage, the one before the newest: ``W[max(0, i-1)]`` for both.

    For minibatches of at least N-1 microbatches, whose gradients are averaged: the version is then always there, and
    two are enough. ``W[i+1] = W[i] - lr * grad(W[i-1])``. Source: PipeDream-2BW (arXiv 2006.09503), section 3.1.
    """

    predicts = False

    def forward(self, minibatch: int, stage: int, stages: int) -> Read:
        return Read(max(0, minibatch - 1))

    def backward(self, minibatch: int, stage: int, stages: int) -> Read:
        return self.forward(minibatch, stage, stages)


class Flush:
    """One version per minibatch, the current one: what synchronous schedules read."""

    predicts = False

    def forward(self, minibatch: int, stage: int, stages: int) -> Read:
        return Read(minibatch)

    def backward(self, minibatch: int, stage: int, stages: int) -> Read:
        return Read(minibatch)


class Still:
    """The weights that are there, for ever: nothing updates them."""

    predicts = False

    def forward(self, minibatch: int, stage: int, stages: int) -> Read:
        return Read(0)

    def backward(self, minibatch: int, stage: int, stages: int) -> Read:
        return Read(0)


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
