"""From samples to the coefficients of a calibration: least squares of relative errors, no coefficient below zero.

Relative, because a prompt of 64 tokens says as much as one of 8,192; the router's own fits weigh in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tollbridge.config.calibration import DecodeFit, PrefillFit
from tollbridge.cost.engine import num_steps
from tollbridge.cost.regression import non_negative

_RIDGE = 1e-12  # relative to the diagonal: cases that cannot tell two terms apart still have one answer
_ABOVE = 1.15  # of a decode step: a prefill that takes less may be waiting for the weights only
_ENOUGH = 4  # samples for three coefficients


class PrefillSample(msgspec.Struct, frozen=True, kw_only=True, tag="prefill", tag_field="kind"):
    """Prefill of `tokens` after `context` cached ones: the median of `repeats`, and the lowest and highest."""

    tokens: int
    context: int
    seconds: float
    low_s: float
    high_s: float
    repeats: int
    source: str  # "metrics" of the server, or "ttft" less the fixed cost


class DecodeSample(msgspec.Struct, frozen=True, kw_only=True, tag="decode", tag_field="kind"):
    """The step of `batch` streams, the same way."""

    batch: int
    seconds: float
    low_s: float
    high_s: float
    repeats: int


def fit_prefill(samples: Sequence[PrefillSample], budget: int, *, floor_s: float = 0.0) -> PrefillFit:
    """Return alpha, beta, gamma of T = k alpha + beta m + gamma m (ctx + m/2), for chunks of `budget` tokens.

    A pass takes at least `floor_s`, a decode step: cost model and planner know that, so prompts so short that they show
    nothing else are left out, as long as enough others remain.
    """
    above = [sample for sample in samples if sample.seconds > _ABOVE * floor_s]
    used = above if len(above) >= _ENOUGH else samples
    rows = [_terms(sample, budget) for sample in used]
    (alpha, beta, gamma), residual = least_squares(rows, [sample.seconds for sample in used])
    return PrefillFit(alpha_s=alpha, beta_s_per_token=beta, gamma_s_per_token2=gamma, residual=residual)


def _terms(sample: PrefillSample, budget: int) -> tuple[float, float, float]:
    m = float(sample.tokens)
    return float(num_steps(m, budget)), m, m * (sample.context + m / 2)


def fit_decode(samples: Sequence[DecodeSample]) -> DecodeFit:
    """Return the step, and what each stream adds to it."""
    rows = [(1.0, float(sample.batch)) for sample in samples]
    (step, per_decode), residual = least_squares(rows, [sample.seconds for sample in samples])
    return DecodeFit(step_s=step, per_decode_s=per_decode, residual=residual)


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[list[float], float]:
    """Return x >= 0 with the least relative squared error of `rows` x = `values` (> 0), and the error's deviation."""
    size = len(rows[0])
    scales = [max(abs(row[i]) / value for row, value in zip(rows, values, strict=True)) or 1.0 for i in range(size)]
    scaled = [
        [x / value / scale for x, scale in zip(row, scales, strict=True)]
        for row, value in zip(rows, values, strict=True)
    ]
    matrix = [[sum(row[i] * row[j] for row in scaled) for j in range(size)] for i in range(size)]
    for i in range(size):
        matrix[i][i] *= 1.0 + _RIDGE
    solution = non_negative(matrix, [sum(row[i] for row in scaled) for i in range(size)])
    errors = [sum(x * c for x, c in zip(row, solution, strict=True)) - 1.0 for row in scaled]
    spare = max(1, len(rows) - sum(1 for x in solution if x > 0.0))
    residual = math.sqrt(sum(error * error for error in errors) / spare)
    return [x / scale for x, scale in zip(solution, scales, strict=True)], residual
