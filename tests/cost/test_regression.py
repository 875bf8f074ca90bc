from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.cost.regression import Regression, non_negative

SCALES = (1.0, 1e3)


def line() -> Regression:
    return Regression((0.01, 1e-4), SCALES, prior_weight=1e-5)


def test_finds_what_made_the_numbers() -> None:
    fit, rng = line(), random.Random(1)
    for _ in range(60):
        size = rng.randint(10, 4000)
        fit.observe((1.0, size), (0.05 + 3e-4 * size) * rng.gauss(1.0, 0.03))
    assert fit.coefficients == pytest.approx([0.05, 3e-4], rel=0.1)
    assert 0.02 <= fit.spread < 0.08


def test_follows_a_change() -> None:
    """An engine that became twice as slow is known for it after fifty requests."""
    fit, rng = line(), random.Random(2)
    for slowness in (1.0, 2.0):
        for _ in range(100):
            size = rng.randint(10, 4000)
            fit.observe((1.0, size), slowness * (0.05 + 3e-4 * size))
    assert fit.predict((1.0, 2000)) == pytest.approx(2 * 0.65, rel=0.1)


def test_outliers_move_it_by_little() -> None:
    fit, rng = line(), random.Random(3)
    for index in range(100):
        size = rng.randint(10, 4000)
        stalled = 20.0 if index % 10 == 9 else 1.0
        fit.observe((1.0, size), stalled * (0.05 + 3e-4 * size))
    assert fit.predict((1.0, 2000)) == pytest.approx(0.65, rel=0.1)


def test_one_observation_says_something_and_not_everything() -> None:
    fit = line()
    fit.observe((1.0, 1000), 1.0)
    assert fit.predict((1.0, 1000)) == pytest.approx(1.0, rel=0.05)
    assert fit.predict((1.0, 10)) < 1.0


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-4, 100.0)), max_size=30))
def test_never_negative(observations: list[tuple[int, float]]) -> None:
    fit = line()
    for size, seconds in observations:
        fit.observe((1.0, size), seconds)
        assert min(fit.coefficients) >= 0.0
        assert fit.predict((1.0, 100)) >= 0.0


@given(
    st.lists(st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3), min_size=4, max_size=8), st.integers(0, 1 << 30)
)
def test_non_negative_is_the_minimum(rows: list[list[float]], seed: int) -> None:
    """No point near the answer, and none far away, that is allowed is better."""
    rng = random.Random(seed)
    targets = [rng.uniform(-1, 5) for _ in rows]
    matrix = [[sum(r[i] * r[j] for r in rows) + (1e-6 if i == j else 0.0) for j in range(3)] for i in range(3)]
    right = [sum(r[i] * t for r, t in zip(rows, targets, strict=True)) for i in range(3)]

    def value(x: list[float]) -> float:
        return 0.5 * sum(x[i] * matrix[i][j] * x[j] for i in range(3) for j in range(3)) - sum(
            b * v for b, v in zip(right, x, strict=True)
        )

    best = non_negative(matrix, right)
    for _ in range(50):
        other = [max(0.0, b + rng.gauss(0, 0.1)) if rng.random() < 0.5 else rng.uniform(0, 3) for b in best]
        assert value(best) <= value(other) + 1e-6 * (1 + abs(value(other)))
