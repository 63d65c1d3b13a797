"""Which ways take turns after their trials, and what is known of all then."""

import math

import pytest

from pipetrain.plan.choice import fastest, finalists, settled


@pytest.mark.parametrize(
    ("first_s", "expected"),
    [
        ([1.1, 1.0, 1.3], [1, 0, 2]),
        ([1.0, 1.4], []),
        ([1.0, math.inf, 1.14, 1.02, 1.01], [0, 4, 3]),
        ([1.1, 1.0, 1.03, 1.02], [1, 3, 0]),  # the first, which is the simplest
        ([1.4, 1.0, 1.03, 1.02, 1.01], [1, 4, 3]),
        ([1.4, 1.04, 1.0, 1.01, 1.02], [2, 3, 1]),  # the simplest that is near
        ([math.inf, math.inf], []),
        ([], []),
    ],
)
def test_those_within_15_percent_of_the_fastest_are_finalists(first_s, expected):
    """By trial and prediction together: 32% by the trial where all predictions are equal."""
    assert finalists(first_s, [1.0] * len(first_s)) == expected


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        ([1.0, 1.0, 1.03], [0, 2]),  # the second is slow in both
        ([1.2, 0.9, 1.0], [2, 0, 1]),  # something else had the machine in the second one's trial
        ([1.6, 1.0, 1.0], [2, 1, 0]),  # the shortest trial, whatever is predicted
        ([3.0, 1.0, 1.0], [2, 1, 0]),
    ],
)
def test_a_single_trial_leaves_out_no_way_that_is_predicted_to_be_fast(predicted, expected):
    assert finalists([1.0, 1.35, 1.05], predicted) == expected


def test_what_a_trial_alone_would_take_has_to_take_its_turns():
    """The first is within 3% of the shortest trial, and simpler; prediction says that it is slow."""
    assert finalists([1.02, 1.0, 1.05], [1.5, 1.0, 1.0]) == [1, 2, 0]


def test_turns_tell_how_finalists_compare_and_first_trials_how_with_the_others():
    """The machine was slow when the second way was tried, and is half as fast in the turns."""
    seconds = settled([1.0, 1.1, 1.5], {0: [2.0, 2.4, 2.0], 1: [1.8, 1.8, 5.0]})
    assert seconds[1] / seconds[0] == pytest.approx(1.8 / 2.0)
    assert seconds[0] + seconds[1] == pytest.approx(2.1) and seconds[2] == 1.5


@pytest.mark.parametrize(
    ("predicted", "expected"), [([1.0, 1.0], 1), ([1.0, 1.02], 1), ([1.0, 1.05], 0), ([1.0, 1.2], 0), ([1.2, 1.0], 1)]
)
def test_the_fastest_is_that_whose_trial_and_prediction_are_shortest_together(predicted, expected):
    assert fastest({0: [1.1], 1: [1.0]}, predicted) == expected


@pytest.mark.parametrize(("predicted", "expected"), [(1.0, 1), (1.05, 1), (1.07, 0)])
def test_a_prediction_counts_as_one_trial(predicted, expected):
    """Three trials have the second 1.06 times as fast; the first is near it from ``1.06**3 / 1.03**4 = 1.058``."""
    assert fastest({0: [1.06, 1.9, 1.0], 1: [1.0, 1.0, 1.0]}, [1.0, predicted]) == expected


@pytest.mark.parametrize(("simplest", "expected"), [(1.05, 0), (1.07, 1)])
def test_the_simplest_is_taken_if_its_mean_of_both_is_within_3_percent(simplest, expected):
    assert fastest({2: [1.01], 1: [1.0], 0: [simplest]}, [1.0, 1.0, 1.0]) == expected


def test_only_those_that_were_tried_as_often_are_taken():
    assert fastest({3: [1.0] * 3, 1: [1.1] * 3}, [1.0, 1.0, 0.1, 1.0]) == 3


def test_first_trials_hold_where_there_are_no_turns():
    assert settled([1.0, 1.5], {}) == [1.0, 1.5]
