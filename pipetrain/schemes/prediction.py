"""Predictions of weights, and corrections of updates for staleness: pure formulas for numbers, arrays and tensors.

The assumption of SpecTrain (arXiv 1809.02839, section 3.2) is that the next updates equal the last one. All
"velocities" here are updates as they were applied, learning rate and sign included, without weight decay and before
constraints; after a change of the learning rate a velocity carries the old one until the next update. Shapes are those
of one variable, units those of weights per update.

The staleness of a minibatch's gradient at a stage is the number of updates that the stage makes between the version
that the minibatch's forward reads (before any prediction) and the update by its gradient.
"""

from __future__ import annotations

from typing import Any

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
