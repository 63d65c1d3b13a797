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
