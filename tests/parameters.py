"""In which tier a test runs with which of its parameters: by default, with ``-m wide`` or with ``-m slow``."""

from __future__ import annotations

import itertools

import pytest


def by_default(names, *chosen, wide=()):
    """A test's parameters: those chosen run by default, those of ``wide`` in that tier, the others with ``-m slow``."""
    return [pytest.param(name, marks=_marks(name in chosen, name in wide)) for name in names]


def widely(*several):
    """Tuples of a test's parameters that run only with ``-m wide``."""
    return [pytest.param(*each, marks=pytest.mark.wide) for each in several]


def rarely(*several):
    """Tuples of a test's parameters that run only with ``-m slow``."""
    return [pytest.param(*each, marks=pytest.mark.slow) for each in several]


def combinations(*values, default=None, pairs=False, wide=()):
    """Every combination of these values as a test's parameters, of which few run by default.

    By default run those of ``default``; without it as many as it takes for every value to run once, or with ``pairs``
    for every pair of values of two parameters. Those of ``wide`` run in that tier, the others with ``-m slow``.
    """
    every = list(itertools.product(*(range(len(each)) for each in values)))
    combined = [tuple(each[n] for each, n in zip(values, numbers)) for numbers in every]
    if default is not None:
        assert all(each in combined for each in (*default, *wide))
        chosen = {numbers for numbers, each in zip(every, combined) if each in default}
    else:
        chosen = _covering(every, 2 if pairs else 1)
    marks = [_marks(numbers in chosen, each in wide) for numbers, each in zip(every, combined)]
    return [pytest.param(*each, marks=mark) for each, mark in zip(combined, marks)]


def _marks(is_default, is_wide):
    return () if is_default else pytest.mark.wide if is_wide else pytest.mark.slow


def _covering(every, size):
    """Greedily, of all combinations of numbers, so many that ``size`` numbers of different places occur together."""
    met = {numbers: set(itertools.combinations(enumerate(numbers), size)) for numbers in every}
    left, chosen = set().union(*met.values()), set()
    while left:
        best = max(every, key=lambda numbers: len(met[numbers] & left))
        chosen.add(best)
        left -= met[best]
    return chosen
