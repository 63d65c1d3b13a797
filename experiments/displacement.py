"""How far weights move in a few updates, and how much of it the last update foretells."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from pipetrain.schemes.policies import predict


@dataclass(frozen=True)
class Errors:
    """Root mean squares, over all weights, of ways to tell version ``step + horizon`` when it is ``step``.

    ``stale`` takes the weights as they are, ``predicted`` moves them ``horizon`` times the last update, ``best``
    moves them ``multiple`` times, the multiple that serves best, to be known afterwards only (least squares).
    """

    step: int
    horizon: int
    stale: float
    predicted: float
    best: float
    multiple: float


@np.errstate(over="ignore", invalid="ignore")  # training that diverges
def errors(step: int, horizon: int, before: np.ndarray, then: np.ndarray, reached: np.ndarray) -> Errors:
    """Errors at version ``step``, from versions ``step - 1``, ``step`` and ``step + horizon``, as flat vectors."""
    moved, velocity = reached - then, then - before
    squared = float(velocity @ velocity)
    multiple = float(moved @ velocity) / squared if squared else 0.0
    return Errors(
        step,
        horizon,
        stale=_rms(moved),
        predicted=_rms(reached - predict(then, velocity, np.float32(horizon))),
        best=_rms(moved - np.float32(multiple) * velocity),
        multiple=multiple,
    )


def _rms(difference: np.ndarray) -> float:
    return math.sqrt(float(difference @ difference) / len(difference))


class Versions:
    """The last versions of a model's weights: as many as the furthest horizon needs, and not one more."""

    def __init__(self, horizons: Sequence[int]) -> None:
        self._horizons = sorted(horizons)
        self._kept: deque[np.ndarray] = deque(maxlen=self._horizons[-1] + 2)
        self._step = -1

    def add(self, weights: Sequence[np.ndarray]) -> list[Errors]:
        """The next version's weights, beginning with version 0; returns the errors of those it is the future of."""
        self._kept.append(np.concatenate([np.ravel(each) for each in weights]))
        self._step += 1
        found = []
        for horizon in self._horizons:
            if self._step - horizon >= 1:  # version 0 has no update behind it
                before, then = self._kept[-horizon - 2], self._kept[-horizon - 1]
                found.append(errors(self._step - horizon, horizon, before, then, self._kept[-1]))
        return found


@dataclass(frozen=True)
class Means:
    """One horizon's errors, averaged over the steps; ``nearer`` is the share of steps where prediction is."""

    horizon: int
    steps: int
    stale: float
    predicted: float
    best: float
    multiple: float
    nearer: float

    @property
    def factor(self) -> float | None:
        """How many times nearer than staleness prediction comes; None for a prediction without error."""
        return self.stale / self.predicted if self.predicted else None


def means(rows: Sequence[Errors]) -> list[Means]:
    """Averages by horizon, in ascending order; steps with weights that are not finite are left out."""
    by_horizon: dict[int, list[Errors]] = {}
    for row in rows:
        if math.isfinite(row.stale + row.predicted + row.best):
            by_horizon.setdefault(row.horizon, []).append(row)
    return [_means(horizon, some) for horizon, some in sorted(by_horizon.items())]


def _means(horizon: int, rows: Sequence[Errors]) -> Means:
    return Means(
        horizon,
        len(rows),
        stale=fmean(row.stale for row in rows),
        predicted=fmean(row.predicted for row in rows),
        best=fmean(row.best for row in rows),
        multiple=fmean(row.multiple for row in rows),
        nearer=fmean(row.predicted < row.stale for row in rows),
    )
