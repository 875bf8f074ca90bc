"""Statistics of paired blocks. Pure.

The unit of observation is a block, never a request: requests of one window share its queue and are not independent. A
metric has one value per (block, arm); two arms are compared by the log of their ratio within each block, and the
interval is Student's t over blocks. A difference is claimed when the interval leaves 1 out *and* the ratio is farther
from 1 than that of an A/A pair in the same run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

CONFIDENCE = 0.95
_TERMS, _BISECTIONS = 200, 60


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Arm over baseline: the geometric mean over blocks, and its interval."""

    mean: float
    low: float
    high: float
    num_blocks: int

    @property
    def differs(self) -> bool:
        """Whether the interval leaves 1 out."""
        return not self.low <= 1.0 <= self.high


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Arm minus baseline: the mean over blocks, in the metric's own unit, and its interval."""

    mean: float
    low: float
    high: float
    num_blocks: int


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile, linear between values as numpy and vLLM have it; NaN of nothing."""
    return float(np.percentile(values, q)) if len(values) else math.nan


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Return (mean, low, high) by Student's t; the interval of one value is everything."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = t_quantile(0.5 + confidence / 2, len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def paired_ratio(arm: Sequence[float], baseline: Sequence[float]) -> Ratio | None:
    """Return the ratio over blocks; None where a value is missing, zero or below."""
    pairs = list(zip(arm, baseline, strict=True))
    if not pairs or any(not (a > 0 and b > 0 and math.isfinite(a) and math.isfinite(b)) for a, b in pairs):
        return None
    mean, low, high = mean_interval([math.log(a / b) for a, b in pairs])
    return Ratio(mean=math.exp(mean), low=_exp(low), high=_exp(high), num_blocks=len(pairs))


def paired_difference(arm: Sequence[float], baseline: Sequence[float]) -> Difference | None:
    """Return the difference over blocks; None where a value is missing."""
    values = [a - b for a, b in zip(arm, baseline, strict=True)]
    if not values or not all(map(math.isfinite, values)):
        return None
    mean, low, high = mean_interval(values)
    return Difference(mean=mean, low=low, high=high, num_blocks=len(values))


def noise_floor(aa: Ratio | None) -> float:
    """Return the factor by which two arms differ that are the same."""
    return max(aa.mean, 1.0 / aa.mean) if aa is not None else 1.0


def claims(ratio: Ratio | None, floor: float = 1.0) -> bool:
    """Return whether a difference may be claimed: not by chance, and beyond the noise floor."""
    if ratio is None or not ratio.differs:
        return False
    return max(ratio.mean, 1.0 / ratio.mean) > floor


def clopper_pearson(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the exact interval of a share (Clopper and Pearson, 1934)."""
    if not trials:
        return 0.0, 1.0
    tail = (1.0 - confidence) / 2
    low = 0.0 if successes == 0 else _beta_quantile(tail, successes, trials - successes + 1)
    high = 1.0 if successes == trials else _beta_quantile(1 - tail, successes + 1, trials - successes)
    return low, high


@lru_cache(maxsize=256)
def t_quantile(p: float, degrees: int) -> float:
    """Return Student's quantile for 0.5 <= p < 1."""
    x = _beta_quantile(2.0 * (1.0 - p), degrees / 2.0, 0.5)  # I_x(v/2, 1/2) is twice the upper tail, x = v/(v + t^2)
    return math.sqrt(degrees * (1.0 - x) / x)


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


def _beta_quantile(p: float, a: float, b: float) -> float:
    """Return x with I_x(a, b) = p, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if incomplete_beta(a, b, middle) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1.0) / (a + b + 2.0):  # it converges fast on the other side
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """Return 1 + d1/(1 + d2/(1 + ...)), evaluated from the far end."""
    value = 1.0
    for m in range(_TERMS, 0, -1):
        half = m // 2
        if m % 2:
            d = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            d = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        value = 1.0 + d / value
    return value
