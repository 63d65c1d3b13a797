"""Predictions of weights some updates ahead, by optimizer: pure formulas for numbers, arrays and tensors.

The assumption of SpecTrain (arXiv 1809.02839, section 3.2) is that the next updates equal the last one. All
"velocities" here are updates as they were applied, learning rate and sign included, without weight decay and before
constraints; after a change of the learning rate a velocity carries the old one until the next update. Shapes are those
of one variable, units those of weights per update.
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
