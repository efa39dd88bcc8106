"""The exact intervals: their levels against scipy's tests, and what they do with too few or equal values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest, wilcoxon

from fusiongate.timing.intervals import Interval, fewest_values, median_interval, signed_rank_interval


@pytest.mark.parametrize("number", [8, 16, 25, 40])
@pytest.mark.parametrize("level", [0.05, 0.01, 0.01 / 3])
def test_the_signed_rank_interval_holds_just_the_centres_that_the_exact_test_does_not_reject(
    number: int, level: float
) -> None:
    values = np.random.default_rng(number).normal(0.2, 1.0, number)
    interval = signed_rank_interval(values, level)
    if math.isinf(interval.low):
        assert wilcoxon(np.abs(values), method="exact").pvalue > level
        return
    for end, inwards in ((interval.low, 1e-9), (interval.high, -1e-9)):
        assert wilcoxon(values - (end + inwards), method="exact").pvalue > level
        assert wilcoxon(values - (end - inwards), method="exact").pvalue <= level


def test_the_estimate_is_the_median_of_the_pairwise_means() -> None:
    assert 2.0 == signed_rank_interval([1.0, 2.0, 3.0], 0.5).value
    # Means of pairs: 0, 1/2, 1, 5, 11/2, 10.
    assert 3.0 == signed_rank_interval([0.0, 1.0, 10.0], 0.5).value


def test_equal_values_give_an_interval_of_no_width() -> None:
    assert Interval(0.5, 0.5, 0.5) == signed_rank_interval([0.5] * 20, 0.01)


@pytest.mark.parametrize("level", [0.5, 0.05, 0.01, 0.01 / 3, 1e-6])
def test_the_fewest_values_are_enough_and_one_less_is_not(level: float) -> None:
    number = fewest_values(level)
    assert math.isfinite(signed_rank_interval(range(number), level).low)
    assert math.isinf(signed_rank_interval(range(number - 1), level).low)


@pytest.mark.parametrize("number", [1, 5, 12, 30, 101])
@pytest.mark.parametrize("level", [0.05, 0.01])
def test_the_median_interval_is_the_tightest_that_the_sign_test_allows(number: int, level: float) -> None:
    interval = median_interval(range(number), level)
    below = 0 if math.isinf(interval.low) else int(interval.low) + 1
    if below:
        assert binomtest(below - 1, number).pvalue <= level
    if below < number // 2:
        assert binomtest(below, number).pvalue > level
    assert interval.high == (math.inf if not below else number - below)
