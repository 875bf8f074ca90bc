from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.config.calibration import DecodeFit, PrefillFit
from tollbridge.cost.engine import EngineModel, num_steps

PREFILL = PrefillFit(alpha_s=0.01, beta_s_per_token=1e-3, gamma_s_per_token2=1e-7)
DECODE = DecodeFit(step_s=0.05, per_decode_s=0.002)


def test_a_stranger_says_so() -> None:
    assert not EngineModel().known
    assert EngineModel(PREFILL, DECODE).known


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 2048))
def test_prefill_is_the_sum_of_its_chunks(num_tokens: int, context: int, budget: int) -> None:
    engine = EngineModel(PREFILL)
    engine.delta_s = engine.rho_s = 0.0
    total, done = 0.0, 0
    while done < num_tokens:
        chunk = min(budget, num_tokens - done)
        total += engine.step_s(0, chunk, context + done)
        done += chunk
    assert engine.prefill_s(num_tokens, context, budget) == pytest.approx(total)


def test_a_mixed_step_reads_the_weights_once() -> None:
    engine = EngineModel(PREFILL, DECODE)
    assert engine.step_s(4) == pytest.approx(0.058)
    assert engine.step_s(4, 1) == pytest.approx(0.058)  # one more token hides behind the weights
    assert engine.step_s(4, 512) == pytest.approx(0.008 + 0.01 + 0.512 + 1e-7 * 512 * 256)


def test_learns_prefill_beside_decodes() -> None:
    """What the decodes in the same steps take is not the prefill's."""
    true, learnt, rng = EngineModel(PREFILL, DECODE), EngineModel(None, DECODE), random.Random(1)
    for _ in range(80):
        num_tokens, context, streams = rng.randint(10, 3000), rng.choice([0, 0, 1000]), rng.randint(0, 6)
        seconds = true.prefill_s(num_tokens, context, 512, streams) * rng.gauss(1.0, 0.02)
        learnt.observe_prefill(seconds, num_tokens, context, 512, num_decodes=streams)
    for num_tokens in (100, 1000, 3000):
        assert learnt.prefill_s(num_tokens, 0, 512) == pytest.approx(true.prefill_s(num_tokens, 0, 512), rel=0.08)


def test_learns_steps() -> None:
    true, learnt, rng = EngineModel(PREFILL, DECODE), EngineModel(), random.Random(1)
    for _ in range(60):
        streams = rng.randint(1, 16)
        learnt.observe_step(true.step_s(streams), streams)
    assert (learnt.delta_s, learnt.rho_s) == pytest.approx((0.05, 0.002), rel=0.05)


def test_fits_can_be_read_back() -> None:
    prefill, decode = EngineModel(PREFILL, DECODE).fits()
    assert EngineModel(prefill, decode).prefill_s(700, 30, 512, 2) == pytest.approx(
        EngineModel(PREFILL, DECODE).prefill_s(700, 30, 512, 2)
    )


@pytest.mark.parametrize(("num_tokens", "budget", "steps"), [(0, 512, 1), (512, 512, 1), (513, 512, 2), (10, 0, 1)])
def test_num_steps(num_tokens: int, budget: int, steps: int) -> None:
    assert num_steps(num_tokens, budget) == steps
