"""Intervals against scipy, and what they promise: no difference where there is none, the true size within them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from tollbridge.bench import stats


@pytest.mark.parametrize("degrees", [1, 2, 4, 9, 30, 200])
@pytest.mark.parametrize("p", [0.9, 0.975, 0.9995])
def test_quantiles_are_students(degrees: int, p: float) -> None:
    assert stats.t_quantile(p, degrees) == pytest.approx(scipy_stats.t.ppf(p, degrees), rel=1e-6)


@pytest.mark.parametrize("successes, trials", [(0, 10), (10, 10), (45, 50), (990, 1000), (1, 7)])
def test_clopper_pearson_is_scipys(successes: int, trials: int) -> None:
    exact = scipy_stats.binomtest(successes, trials).proportion_ci()
    assert stats.clopper_pearson(successes, trials) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_percentiles_are_numpys() -> None:
    values = [5.0, 1.0, 3.0, 2.0]
    assert stats.percentile(values, 99) == float(np.percentile(values, 99))
    assert math.isnan(stats.percentile([], 50))


def test_a_ratio_needs_positive_values() -> None:
    assert stats.paired_ratio([1.0, 0.0], [1.0, 1.0]) is None
    assert stats.paired_ratio([1.0, math.nan], [1.0, 1.0]) is None
    assert stats.paired_ratio([], []) is None


def test_one_block_claims_nothing() -> None:
    ratio = stats.paired_ratio([10.0], [1.0])
    assert ratio is not None and not ratio.differs and ratio.low == 0.0 and ratio.high == math.inf


def test_a_clear_difference_is_claimed_unless_the_same_arm_differs_as_much() -> None:
    ratio = stats.paired_ratio([20.0, 21.0, 19.0], [10.0, 10.0, 10.0])
    assert stats.claims(ratio)
    assert stats.claims(ratio, floor=1.5)
    assert not stats.claims(ratio, floor=2.5)


def test_the_noise_floor_is_what_an_aa_pair_differs_by() -> None:
    below = stats.paired_ratio([0.8, 0.8], [1.0, 1.0])
    assert stats.noise_floor(below) == pytest.approx(1.25)
    assert stats.noise_floor(None) == 1.0


def test_over_many_runs_aa_claims_are_rare_and_a_planted_delay_lies_inside() -> None:
    """5 % of A/A runs would be claimed by the interval alone; with the floor of a third arm fewer."""
    rng = np.random.default_rng(11)
    runs, blocks, planted = 2000, 5, 5.0
    claimed = inside = found = 0
    for _ in range(runs):
        drift = 100.0 * np.exp(rng.normal(0.0, 0.3, blocks))  # what a block has in common: it cancels
        one, again, same = (drift * np.exp(rng.normal(0.0, 0.02, blocks)) for _ in range(3))
        floor = stats.noise_floor(stats.paired_ratio(again, one))
        claimed += stats.claims(stats.paired_ratio(same, one), floor)
        difference = stats.paired_difference(one + planted, one + rng.normal(0.0, 1.0, blocks))
        assert difference is not None
        inside += difference.low <= planted <= difference.high
        found += difference.low > 0.0
    assert claimed / runs < 0.05
    assert 0.935 < inside / runs < 0.965
    assert found / runs > 0.95
