"""Pairs: the order that is drawn, the looks that are planned, and an interval that holds its level in any noise."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from scipy.stats import binom, norm

from fusiongate.errors import UsageError
from fusiongate.timing.intervals import Outcome
from fusiongate.timing.pairing import Schedule, Settings, orders

from .timing_noise import NOISES, Simulated, measured

TRIALS = 200
AS_ON_A_GPU = Settings(seconds=0.3, margin=0.003, precision=None)


def allowed_misses(level: float) -> int:
    """As many as a procedure of exactly this level exceeds once in a thousand runs of the test."""
    return int(binom.ppf(0.999, TRIALS, level))


@pytest.mark.parametrize(
    "ratio, tick_s",
    [(1.0, 0.0), (1.004, 0.0), (1.004, 0.5e-6), (1.004, 5e-6)],
    ids=["equal", "other", "other-half-microsecond-ticks", "other-coarse-ticks"],
)
@pytest.mark.parametrize("noise", NOISES)
def test_the_interval_misses_the_true_ratio_no_oftener_than_its_level_says(
    noise: str, ratio: float, tick_s: float
) -> None:
    """At whatever look it stops, and at a confidence that would show an excess: a tenth may miss."""
    settings = Settings(margin=0.003, confidence=0.9, precision=None)
    trials = (measured([1.0, ratio], noise, seed, settings, tick_s=tick_s).ratios[1] for seed in range(TRIALS))
    missed = sum(not trial.low <= ratio <= trial.high for trial in trials)
    assert missed <= allowed_misses(0.1)


def test_one_arm_after_the_other_misses_the_true_ratio_of_a_drifting_clock() -> None:
    """The test above can fail: without pairs and with a normal interval, the clock's drift becomes the verdict."""
    missed = 0
    for seed in range(TRIALS):
        first, second = np.log(Simulated([1.0, 1.0], "drifting", seed).sample([0] * 72 + [1] * 72)).reshape(2, 72)
        reach = norm.ppf(0.95) * np.sqrt((first.var(ddof=1) + second.var(ddof=1)) / 72)
        missed += bool(abs(second.mean() - first.mean()) > reach)
    assert missed > 2 * allowed_misses(0.1)


def test_looking_five_times_at_the_full_level_misses_too_often() -> None:
    """Why the level is divided: stopping at the first look that excludes 1 spends the whole level at each of them."""
    looks = (16, 28, 40, 52, 64)
    missed = 0
    for seed in range(TRIALS):
        for last in looks:
            settings = Settings(margin=1e-9, confidence=0.9, precision=None)
            ratio = measured([1.0, 1.0], "normal", seed, settings, looks=(last,)).ratios[1]
            if not ratio.low <= 1.0 <= ratio.high:
                missed += 1
                break
    assert missed > allowed_misses(0.1)


@pytest.mark.parametrize("noise", NOISES)
def test_the_same_arm_twice_is_never_called_faster_or_slower(noise: str) -> None:
    counted = Counter(measured([1.0, 1.0], noise, seed, AS_ON_A_GPU).ratios[1].outcome for seed in range(TRIALS))
    assert counted[Outcome.FASTER] + counted[Outcome.SLOWER] <= allowed_misses(0.01)


@pytest.mark.parametrize("noise", ["normal", "heavy-tailed", "clock-switching"])
def test_the_same_arm_twice_is_called_the_same(noise: str) -> None:
    outcomes = [measured([1.0, 1.0], noise, seed, AS_ON_A_GPU).ratios[1].outcome for seed in range(100)]
    assert outcomes.count(Outcome.SAME) >= 90


@pytest.mark.parametrize("noise", ["normal", "heavy-tailed", "clock-switching"])
@pytest.mark.parametrize("ratio, expected", [(1.01, Outcome.SLOWER), (0.99, Outcome.FASTER)])
def test_a_planted_percent_is_called_by_its_name(noise: str, ratio: float, expected: Outcome) -> None:
    outcomes = [measured([1.0, ratio], noise, seed, AS_ON_A_GPU).ratios[1].outcome for seed in range(100)]
    assert outcomes.count(expected) >= 99


def test_samples_that_all_round_to_one_tick_leave_open_what_the_clock_cannot_tell() -> None:
    settings = Settings(margin=0.003, precision=None)
    simulated = measured([1.0, 1.0002], "normal", 0, settings, tick_s=1e-3)
    assert simulated.ratios[1].low < 1.0002 < simulated.ratios[1].high
    assert Outcome.INCONCLUSIVE is simulated.ratios[1].outcome


def test_each_unit_measures_every_arm_twice_in_mirrored_order() -> None:
    for order in orders(4, 20, random.Random(0)):
        assert list(order) == list(order)[::-1]
        assert Counter(dict.fromkeys(range(4), 2)) == Counter(order)


def test_each_arm_comes_first_equally_often() -> None:
    first = Counter(order[0] for order in orders(2, 2000, random.Random(1)))
    assert binom.ppf(0.001, 2000, 0.5) <= first[0] <= binom.ppf(0.999, 2000, 0.5)


def test_the_looks_fit_the_time_and_share_the_level() -> None:
    schedule = Schedule.plan(Settings(seconds=0.3, confidence=0.99), unit_s=0.004)
    assert (16, 31, 63) == schedule.looks
    assert 0.01 == pytest.approx(schedule.level * 3)


def test_a_unit_as_long_as_the_time_is_still_measured_often_enough_for_an_interval() -> None:
    schedule = Schedule.plan(Settings(seconds=0.3), unit_s=0.3)
    assert (16,) == schedule.looks
    assert 0.01 == pytest.approx(schedule.level)


def test_a_measurement_goes_on_until_it_is_precise() -> None:
    settled = measured([1.0, 3.0], "normal", 0, Settings(margin=0.003, precision=None)).ratios[1]
    precise = measured([1.0, 3.0], "normal", 0, Settings(margin=0.003, precision=0.0015)).ratios[1]
    assert 1 == settled.looks
    assert settled.looks < precise.looks


def test_further_arms_are_each_held_against_the_first() -> None:
    paired = measured([1.0, 0.5, 2.0], "normal", 0, AS_ON_A_GPU)
    assert 0.5 == pytest.approx(paired.ratios[1].value, rel=0.01)
    assert 2.0 == pytest.approx(paired.ratios[2].value, rel=0.01)
    assert (2 * len(paired.seconds), 3) == (paired.ratios[1].pairs, paired.seconds.shape[2])


@pytest.mark.parametrize(
    "wrong", [{"seconds": 0.0}, {"margin": -0.1}, {"confidence": 1.0}, {"precision": 0.0}, {"retries": -1}]
)
def test_settings_that_mean_nothing_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}=.*: expected "):
        Settings(**wrong)  # type: ignore[arg-type]
