"""A run-off: ways that took about equally long in a trial take turns, since a machine's speed drifts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from pipetrain.plan.choice import MARGIN

CLOSE, MOST, TURNS = 1.15, 3, 3


def finalists(first_s: Sequence[float]) -> list[int]:
    """Numbers of those within 15% of the fastest, three at most, the fastest first; none if it stands alone.

    The simplest of those within 15% is among them, since it is taken even if another is a little faster.

    Args:
        first_s: seconds of a minibatch in the trial of each, infinite if it failed, or the geometric mean of
            that and of what is predicted; the simplest comes first.
    """
    most_s = CLOSE * min(first_s, default=math.inf)
    close = sorted((n for n, each in enumerate(first_s) if each <= most_s < math.inf), key=first_s.__getitem__)
    simplest = min(close, default=0)
    near = [*close[: MOST - 1], simplest] if simplest in close[MOST:] else close[:MOST]
    return near if len(near) > 1 else []


def settled(first_s: Sequence[float], turns_s: Mapping[int, Sequence[float]]) -> list[float]:
    """Seconds of a minibatch of each, where the turns of the finalists tell how they compare with one another.

    For finalist n ``median(turns_s[n]) * sum(first_s of finalists) / sum(medians)``, so that all of them together are
    as far from the others as in the first trials.
    """
    medians = {n: statistics.median(each) for n, each in turns_s.items()}
    scale = sum(first_s[n] for n in medians) / sum(medians.values()) if medians else 1.0
    return [medians[n] * scale if n in medians else each for n, each in enumerate(first_s)]


def fastest(trials_s: Mapping[int, Sequence[float]], predicted: Sequence[float]) -> int:
    """The number of the simplest within 3% of the one whose trials and prediction are shortest together.

    Of that one ``median(trials_s[n]) ** trials * predicted[n]`` is the least: a prediction is taken to tell as well as
    one trial how ways compare, and the middle of several as well as so many. The least of many values that err is too
    short as a rule.

    Args:
        trials_s: seconds of a minibatch in the trials of each that may be the fastest, by its number, equally many.
        predicted: how many times as long as the shortest each is simulated to take; the simplest comes first.
    """
    together = {n: statistics.median(each) ** len(each) * predicted[n] for n, each in trials_s.items()}
    counted = 1 + max(map(len, trials_s.values()))
    return min(n for n, each in together.items() if each <= MARGIN**counted * min(together.values()))
