"""Corrections of updates for the staleness of their gradients: pure formulas for numbers, arrays and tensors.

The staleness of a minibatch's gradient at a stage is the number of updates that the stage makes between the version
that the minibatch's forward reads (before any prediction) and the update by its gradient.
"""

from __future__ import annotations

from typing import Any

from pipetrain.schemes.prediction import positive


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
