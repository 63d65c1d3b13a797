"""Which weights each forward and backward reads: a version of the stage's weights, and how far to predict from it.

``W_k[v]`` are stage k's weights after v updates; N stages, k = 0 ... N-1; M microbatches are a minibatch, and minibatch
i's last backward makes ``W_k[i+1]``. A policy gives the version and the horizon for a forward and for a backward, as
plain numbers; which version a forward finds depends on the schedule, and of weights that several stages share on the
first of these stages too.

What a policy of this module reads must not depend on how long training has lasted: when a pipeline has been full for
four times its depth, the slices of its course are taken for alike (``run/course_runner.py``). Policies of other modules
are asked for every minibatch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

FADING = 0.95  # of what was observed before, with every observation: some twenty count
MOST = 4.0  # times the velocity that an observation may say: as momentum begins, weights go that much further
TINY = 1e-30  # for a first ratio of 1


def predict(weight: Any, velocity: Any, horizon: Any) -> Any:
    """``W + s * v``: the weights s updates ahead (arXiv 1809.02839, equation 4)."""
    return weight + horizon * velocity


def decayed(decay: Any, horizon: Any) -> tuple[Any, Any]:
    """``(kept, s')`` where every update first takes ``decay * W`` off the weights: ``predict(kept * W, v, s')``.

    ``W[t+1] = (1-d) * W[t] + v`` s times over is ``(1-d)^s * W + (1 - (1-d)^s)/d * v``. In Keras' decoupled weight
    decay (Loshchilov and Hutter 2017, arXiv 1711.05101) d is ``learning_rate * weight_decay``. d is not zero.
    """
    kept = (1 - decay) ** horizon
    return kept, (1 - kept) / decay


def momentum(slot: Any) -> Any:
    """``v = m`` of SGD: Keras' slot ``m <- mu*m - lr*g`` is the update itself (arXiv 1809.02839, equation 1)."""
    return slot


def nesterov(slot: Any, slot_before: Any, mu: Any) -> Any:
    """``v = mu*m' - lr*g`` of SGD with Nesterov momentum, ``m' = mu*m - lr*g`` (Sutskever et al. 2013)."""
    return mu * slot + (slot - mu * slot_before)


def adam(m: Any, v: Any, rate: Any, beta_1: Any, beta_2: Any, epsilon: Any, step: Any) -> Any:
    """``-lr * sqrt(1 - beta_2^t) / (1 - beta_1^t) * m / (sqrt(v) + epsilon)`` of Adam and AdamW, after step t >= 1.

    As Keras applies it, with epsilon outside the correction. Sources: Kingma and Ba 2014 (arXiv 1412.6980, section 2);
    as a prediction, XPipe (arXiv 1911.04610, equation 5). ``rate`` is the rate of the last step.
    """
    correction = (1 - beta_2**step) ** 0.5 / (1 - beta_1**step)
    return -rate * correction * m / (v**0.5 + epsilon)


def rmsprop(slot: Any) -> Any:
    """``v = -m`` of RMSprop with momentum, whose slot ``m <- mu*m + lr*g/sqrt(...)`` Keras subtracts."""
    return -slot


def ratio(along: Any, square: Any) -> Any:
    """``max(0, along + tiny) / (square + tiny)``: the multiple of ``s * v`` nearest to the weights' displacement.

    Least squares of the displacements over s updates on the velocities at their start, with decaying weights: ``along``
    is the sum of ``gamma^age * <W[t+s] - W[t], v[t]> / s``, ``square`` that of ``gamma^age * <v[t], v[t]>``; see
    ``observed``. 1, the paper's, as long as both are 0.
    """
    return positive(along + TINY) / (square + TINY)


def observed(sums: Any, along: Any, square: Any) -> tuple[Any, Any]:
    """The sums of ``ratio`` with one more observation; gamma is ``FADING``.

    An observation's own ratio counts as ``-MOST`` to ``MOST``: after a jump of the learning rate the velocity at the
    start does not predict the displacement.
    """
    within = along - positive(along - MOST * square) + positive(-along - MOST * square)
    return FADING * sums[0] + within, FADING * sums[1] + square


def positive(value: Any) -> Any:
    """``max(0, value)`` for anything that has an absolute value."""
    return (value + abs(value)) / 2


def spike(mu: float, staleness: Any) -> tuple[Any, Any]:
    """``(a, b)`` of ``w <- w + a*m + b*(-lr*g)`` after ``m <- mu*m - lr*g``: ``a = mu^D, b = (1 - mu^D)/(1 - mu)``.

    A gradient with a staleness of D updates is applied at once as far as momentum would have applied it by then; in the
    end it has moved the weights as far as without staleness. For D = 0 it is SGD with momentum. Source: Kosson et al.
    2020 (arXiv 2003.11666), spike compensation, in Keras' signs; 0 <= mu < 1.
    """
    a = mu**staleness
    return a, (1 - a) / (1 - mu)


def rescaled(rate: Any, staleness: Any, step: Any, steps: Any) -> Any:
    """``rate / max(1, D)^p`` with ``p = max(0, 1 - step/steps)``: smaller for stale gradients, with a vanishing effect.

    Source: PipeMare (Yang et al. 2019, arXiv 1910.05124), learning rate rescheduling (T1). ``step`` counts updates.
    """
    left = 1 - step / steps
    return rate / (positive(staleness - 1) + 1) ** positive(left)


def stretches(stages: int, microbatches: int) -> bool:
    """Whether momentum is to be stretched where all stages predict one target: with fewer microbatches than stages."""
    return microbatches < stages


def reaches(stages: int, microbatches: int) -> float:
    """c of ``policies.OneTargetPolicy`` where momentum may be stretched: 1.5 where it is, else 1."""
    return 1.5 if stretches(stages, microbatches) else 1.0


def stretch(stages: int, microbatches: int) -> float:
    """``f = min(1, 1.6 / (1 + (N-1)/M))``, and 1 where nothing is stretched: N stages, M microbatches a minibatch.

    Momentum is stretched by it as ``stretched`` says. What an update adds to the weights counts then for ``1/f`` times
    as many later updates, and for as much less at once: the last update foretells more of the next ones.
    """
    return min(1.0, 1.6 / (1 + (stages - 1) / microbatches)) if stretches(stages, microbatches) else 1.0


def stretched(mu: float, factor: float) -> float:
    """``mu'`` of ``1 - mu' = f * (1 - mu)``.

    A momentum that sums gradients (SGD's) grows by ``(1 - mu)/(1 - mu')``, so its learning rate is multiplied by f; one
    that averages them (Adam's ``beta_1``) does not, and its rate stays.
    """
    return 1 - factor * (1 - mu)


class Read(NamedTuple):
    """Read version ``version``, moved ``horizon`` updates ahead along the velocity of that version."""

    version: int
    horizon: float = 0


class Reader(NamedTuple):
    """What reads weights: microbatch m (M a minibatch) at stage k of N, under a schedule's ``found``.

    ``first`` is the first of the stages that share the weights; None for the stage's own. It completes their gradients,
    and what it has completed comes down with the next forward.
    """

    microbatch: int
    stage: int
    stages: int
    microbatches: int
    found: Callable[[int, int, int, int], int]
    first: int | None = None

    @property
    def minibatch(self) -> int:
        """``i = floor(m / M)``: the number of the minibatch."""
        return self.microbatch // self.microbatches

    def newest(self, stage: int | None = None) -> int:
        """``v_F``: the updates of the weights when F(m) begins; of another stage's own, when its F(m) begins."""
        if stage is None:
            stage = self.stage if self.first is None else self.first
        return self.found(self.microbatch, stage, self.stages, self.microbatches)

    def current(self) -> int:
        """The updates of the weights when B(m) begins: i, or for shared ones what came with the last forward before it.

        ``max(0, i - (k - a))`` in the asynchronous order, a being the first stage that has them.
        """
        if self.first is None or self.first == self.stage:
            return self.minibatch
        ahead = self.microbatch + self.stages - 1 - self.stage
        return min(self.minibatch, self.found(ahead, self.first, self.stages, self.microbatches))


class Policy(Protocol):
    """The weights of F(m) and of B(m); ``predicts`` says whether any horizon is above 0."""

    @property
    def predicts(self) -> bool: ...

    def forward(self, reader: Reader) -> Read: ...

    def backward(self, reader: Reader) -> Read: ...


class VanillaPolicy:
    """The newest weights: F(i) reads ``W[v_F]``, B(i) reads ``W[i]`` with the activations that F stored."""

    predicts = False

    def forward(self, reader: Reader) -> Read:
        return Read(reader.newest())

    def backward(self, reader: Reader) -> Read:
        return Read(reader.current())


class WeightStashingPolicy:
    """B(i) reads the version that F(i) read: ``W[v_F]`` for both (PipeDream, arXiv 1806.03377)."""

    predicts = False

    def forward(self, reader: Reader) -> Read:
        return Read(reader.newest())

    def backward(self, reader: Reader) -> Read:
        return self.forward(reader)


class VerticalSyncPolicy:
    """One version per minibatch at every stage: ``W[max(0, i-(N-1))]`` for both (PipeDream)."""

    predicts = False

    def forward(self, reader: Reader) -> Read:
        return Read(reader.newest(0))

    def backward(self, reader: Reader) -> Read:
        return self.forward(reader)


class SpecTrainPolicy:
    """Predicted weights: what the newest version will be when the minibatch's round trip ends.

    ``s = min(i, N-1-k) + floor(k/2)`` from version ``v_F`` in F(i); ``s = floor(k/2)`` from version ``i`` in
    B(i). In steady state these are the paper's ``floor(k/2) + N-k-1`` and ``floor(k/2)``; the minimum is the
    ramp-up after a start or a drain, where fewer updates lie ahead. Source: arXiv 1809.02839, equations 4-6. Shared
    weights are predicted from the version that is there to the same target.
    """

    predicts = True

    def forward(self, reader: Reader) -> Read:
        newest = reader.newest()
        return Read(newest, reader.minibatch - newest + reader.stage // 2)

    def backward(self, reader: Reader) -> Read:
        current = reader.current()
        return Read(current, reader.minibatch - current + reader.stage // 2)


class LocalSpecTrainPolicy:
    """Predicted weights as of the minibatch's own backward at this stage, which reads the same weights.

    ``s = min(i, N-1-k)`` from version ``v_F``, for both. Memory: at stage k, N-1-k predicted copies of old versions.
    Sources: the SpecTrain authors' second version; PipeOptim (arXiv 2312.00839).
    """

    predicts = True

    def forward(self, reader: Reader) -> Read:
        newest = reader.newest()
        return Read(newest, reader.minibatch - newest)

    def backward(self, reader: Reader) -> Read:
        return self.forward(reader)


@dataclass(frozen=True)
class OneTargetPolicy:
    """Predicted weights: all stages, forward and backward, aim at the same version, which may lie between two.

    Microbatch m is to read version ``A = (m_F + c*(N-1)) / M`` at every stage, ``m_F = max(0, m - (N-1-k))``: F(m) from
    version ``v_F = floor(m_F/M)``, ``s = A - v_F`` updates ahead; B(m) from version ``i = floor(m/M)``,
    ``s = max(0, A - i)`` ahead. ``c`` is 1.5 where momentum is stretched, else 1 (``reaches``).
    Shared weights are predicted from the version that is there to the same A.

    ``stretch``: whether momentum is stretched; ``"auto"`` until the optimizer is known, by which it is decided.
    """

    stretch: bool | Literal["auto"] = "auto"
    predicts = True

    def forward(self, reader: Reader) -> Read:
        newest = reader.newest()
        return Read(newest, self._ahead(reader, newest))

    def backward(self, reader: Reader) -> Read:
        current = reader.current()
        return Read(current, max(0.0, self._ahead(reader, current)))

    def _ahead(self, reader: Reader, version: int) -> float:
        """``A - version``, of whole numbers of microbatches: the same few numbers for ever."""
        microbatch, stage, stages, microbatches, *_ = reader
        done = max(0, microbatch - (stages - 1 - stage)) - version * microbatches
        reach = reaches(stages, microbatches) if self.stretch else 1
        return (done + reach * (stages - 1)) / microbatches


@dataclass(frozen=True)
class TwoVersionsPolicy:
    """One version per minibatch at every stage, the version before the newest: ``W[max(0, i-1)]`` for both.

    For minibatches of at least N-1 microbatches, whose gradients are averaged: the version is then always there, and
    two are enough. ``W[i+1] = W[i] - lr * grad(W[i-1])``. Source: PipeDream-2BW (arXiv 2006.09503), section 3.1.

    With a ``horizon`` s both read ``W[i-1] + s*(W[i-1] - W[i-2])``, which is stored in place of ``W[i-1]``; the first
    minibatch after a start or a drain, which finds no version before the newest, reads ``W[0]``.
    """

    horizon: float = 0

    @property
    def predicts(self) -> bool:
        """Unless the horizon is 0."""
        return self.horizon > 0

    @staticmethod
    def microbatches(stages: int) -> int:
        """The fewest that it needs: ``max(1, N-1)``."""
        return max(1, stages - 1)

    def forward(self, reader: Reader) -> Read:
        before = reader.minibatch - 1
        return Read(0) if before < 0 else Read(before, self.horizon)

    def backward(self, reader: Reader) -> Read:
        return self.forward(reader)


class FlushPolicy:
    """One version per minibatch, the current one: what synchronous schedules read."""

    predicts = False

    def forward(self, reader: Reader) -> Read:
        return Read(reader.minibatch)

    def backward(self, reader: Reader) -> Read:
        return Read(reader.minibatch)


class StillPolicy:
    """The current weights, which are never updated."""

    predicts = False

    def forward(self, reader: Reader) -> Read:
        return Read(0)

    def backward(self, reader: Reader) -> Read:
        return Read(0)


def __getattr__(name: str) -> Any:
    """A policy by its name of 0.1, such as ``Vanilla``, with a warning."""
    found = globals().get(f"{name}Policy")
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"policies.{name} is now policies.{name}Policy; its old name will go.", FutureWarning, stacklevel=2)
    return found
