"""Which weights each forward and backward reads: a version of the stage's weights, and how far to predict from it.

``W_k[v]`` are stage k's weights after v updates; N stages, k = 0 ... N-1; minibatch i's backward makes
``W_k[i+1]``. A policy answers two questions with plain numbers, whatever the weights are made of.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


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
