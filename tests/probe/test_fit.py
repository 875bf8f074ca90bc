from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.probe.fit import DecodeSample, PrefillSample, fit_decode, fit_prefill, least_squares


def prefill(tokens: int, context: int, seconds: float) -> PrefillSample:
    return PrefillSample(
        tokens=tokens, context=context, seconds=seconds, low_s=seconds, high_s=seconds, repeats=1, source="metrics"
    )


def decode(batch: int, seconds: float) -> DecodeSample:
    return DecodeSample(batch=batch, seconds=seconds, low_s=seconds, high_s=seconds, repeats=1)


@given(
    alpha=st.floats(1e-4, 0.1),
    beta=st.floats(1e-6, 1e-2),
    gamma=st.floats(1e-10, 1e-6),
    budget=st.sampled_from([256, 512, 2048]),
)
def test_exact_samples_give_the_coefficients_back(alpha: float, beta: float, gamma: float, budget: int) -> None:
    cases = [(64, 0), (256, 0), (512, 0), (1024, 0), (1536, 0), (4096, 0), (256, 1024), (256, 8192)]
    chunks = [-(-m // budget) for m, _ in cases]
    times = [k * alpha + beta * m + gamma * m * (c + m / 2) for k, (m, c) in zip(chunks, cases, strict=True)]
    fit = fit_prefill([prefill(m, c, t) for (m, c), t in zip(cases, times, strict=True)], budget)
    predicted = [
        k * fit.alpha_s + m * fit.beta_s_per_token + fit.gamma_s_per_token2 * m * (c + m / 2)
        for k, (m, c) in zip(chunks, cases, strict=True)
    ]
    assert predicted == pytest.approx(times, rel=1e-3)
    assert fit.residual < 1e-3


def test_prompts_that_only_wait_for_the_weights_are_left_out() -> None:
    samples = [prefill(m, 0, max(0.02, 0.004 + 6e-5 * m)) for m in (32, 64, 128, 512, 1024, 1536, 2048)]
    fit = fit_prefill(samples, 2048, floor_s=0.02)
    assert fit.alpha_s == pytest.approx(0.004, rel=1e-3)
    assert fit.beta_s_per_token == pytest.approx(6e-5, rel=1e-3)


def test_no_coefficient_is_negative() -> None:
    fit = fit_decode([decode(1, 0.02), decode(8, 0.019)])
    assert fit.per_decode_s == 0.0
    assert 0.019 <= fit.step_s <= 0.02


def test_the_residual_is_the_relative_deviation() -> None:
    _, residual = least_squares([(1.0,)] * 4, [1.1, 0.9, 1.1, 0.9])
    assert math.isclose(residual, math.sqrt(4 * 0.01 / 3), rel_tol=0.05)
