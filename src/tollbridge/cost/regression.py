"""Least squares that forgets, resists outliers and never answers with a negative coefficient. Plain Python: few terms.

Kept in information form (sums of x x' and x y), which is recursive least squares without its numerical drift. Each
observation counts by 1 / y^2, so errors are relative: a prompt of 20 tokens says as much as one of 2,000. A prior of
a few pretended observations holds the coefficients where nothing has been seen yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

FORGET = 0.96  # weight of the past per observation: about the last twenty-five count
OUTLIER_SPREADS = 2.0  # beyond so many spreads an observation counts less, the farther the less (Huber)
MIN_SPREAD = 0.02  # relative; a spread is never taken for smaller than timers and schedulers make it
START_SPREAD = 0.5  # relative, before anything has been seen
_SPREAD_WEIGHT = 0.1
_RIDGE = 1e-9


class Regression:
    """Fits y = sum of coefficient x feature. `scales` are typical sizes of the features; they keep the sums tame."""

    def __init__(
        self,
        start: Sequence[float],
        scales: Sequence[float],
        *,
        prior_weight: float = 0.0,
        spread: float = START_SPREAD,
    ) -> None:
        size = len(start)
        self._scales = tuple(scales)
        self._coefficients = [value * scale for value, scale in zip(start, scales, strict=True)]  # per scaled feature
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._start = list(self._coefficients)
        self._prior = [prior_weight / value**2 if value else 0.0 for value in self._coefficients]
        self._is_stale = False
        self._deviation = spread
        self.num_observations = 0

    @property
    def coefficients(self) -> list[float]:
        """The fit, per unit of each feature; none is negative."""
        if self._is_stale:
            self._solve()
        return [value / scale for value, scale in zip(self._coefficients, self._scales, strict=True)]

    @property
    def spread(self) -> float:
        """Relative standard deviation of what was observed around what had been predicted."""
        return max(MIN_SPREAD, self._deviation)

    def predict(self, features: Sequence[float]) -> float:
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def observe(self, features: Sequence[float], value: float, *, weight: float = 1.0) -> float:
        """Learn one observation; return the relative error that the prediction of before would have had."""
        if value <= 0.0:
            return 0.0
        predicted = self.predict(features)
        error = (predicted - value) / value
        bound = OUTLIER_SPREADS * self.spread
        trust = weight if self.num_observations < len(self._start) else weight * min(1.0, bound / max(abs(error), 1e-9))
        self._add([x / scale / value for x, scale in zip(features, self._scales, strict=True)], trust)
        # A deviation is 1.25 mean absolute ones; a single outlier moves it by little.
        step = min(1.25 * abs(error), 4.0 * max(self._deviation, MIN_SPREAD))
        self._deviation += _SPREAD_WEIGHT * min(1.0, weight) * (step - self._deviation)
        self.num_observations += 1
        return error

    def _add(self, row: list[float], weight: float) -> None:
        """Add a row whose target is 1 (both sides were divided by the value)."""
        for i, x in enumerate(row):
            line = self._products[i]
            for j, z in enumerate(row):
                line[j] = FORGET * line[j] + weight * x * z
            self._targets[i] = FORGET * self._targets[i] + weight * x
        self._is_stale = True

    def _solve(self) -> None:
        self._is_stale = False
        size = len(self._start)
        matrix = [list(line) for line in self._products]
        targets = list(self._targets)
        for i in range(size):
            matrix[i][i] += self._prior[i] + _RIDGE
            targets[i] += (self._prior[i] + _RIDGE) * self._start[i]
        self._coefficients = non_negative(matrix, targets)


def non_negative(matrix: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return x >= 0 that minimises x'Ax / 2 - b'x for a positive definite A, by trying which terms are zero."""
    size = len(targets)
    best, best_value = [0.0] * size, 0.0
    for count in range(size, 0, -1):
        for chosen in combinations(range(size), count):
            part = _solve_part(matrix, targets, chosen)
            if part is None or min(part) < 0.0:
                continue
            value = -0.5 * sum(x * targets[i] for x, i in zip(part, chosen, strict=True))
            if value < best_value:
                best, best_value = [0.0] * size, value
                for x, i in zip(part, chosen, strict=True):
                    best[i] = x
        if count == size and best_value < 0.0:
            break  # the unconstrained minimum is allowed, so nothing is better
    return best


def _solve_part(
    matrix: Sequence[Sequence[float]], targets: Sequence[float], chosen: tuple[int, ...]
) -> list[float] | None:
    """Solve the equations of the chosen terms by elimination with pivots; None when they are singular."""
    rows = [[matrix[i][j] for j in chosen] + [targets[i]] for i in chosen]
    size = len(chosen)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        if abs(rows[pivot][column]) < 1e-300:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for below in range(column + 1, size):
            factor = rows[below][column] / rows[column][column]
            for j in range(column, size + 1):
                rows[below][j] -= factor * rows[column][j]
    solution = [0.0] * size
    for i in range(size - 1, -1, -1):
        rest = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - rest) / rows[i][i]
    return solution
