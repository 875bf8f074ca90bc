"""The curves of stall and toll, and where they cross."""

from __future__ import annotations

import pytest

from tollbridge.config.calibration import DecodeFit, PrefillFit
from tollbridge.cost.engine import EngineModel
from tollbridge.ui.breakeven import Ground, break_even

ENGINE = EngineModel(
    PrefillFit(alpha_s=0.0, beta_s_per_token=1e-3, gamma_s_per_token2=0.0, residual=0.1),
    DecodeFit(step_s=0.02, per_decode_s=0.0, residual=0.1),
)


def ground(goodput: float, overhead_s: float = 0.0) -> Ground:
    return Ground(
        prefill="p0", decode="d0", sender=ENGINE, receiver=ENGINE, budget=100_000,
        goodput_bytes_per_s=goodput, bytes_per_token=1000.0, overhead_s=overhead_s,
    )  # fmt: skip


def test_a_fast_link_costs_one_step_and_the_second_leg() -> None:
    """1 ms of prefill a token: m tokens stall for (m - 20) ms; the toll is 20 ms, 30 ms, and one layer on the wire."""
    even = break_even(ground(1e9, overhead_s=0.03), lengths=(20, 40, 80, 160))
    assert even.stall_s == pytest.approx([0.0, 0.02, 0.06, 0.14], abs=1e-4)
    assert even.toll_s == pytest.approx([0.05] * 4, abs=1e-3)
    assert even.tokens_at_par == pytest.approx(70, abs=1)  # on the line from 40 (-30 ms) to 80 (+10 ms)


def test_a_slow_link_never_pays_for_one_neighbour() -> None:
    """0.4 MB/s: 2.5 ms of wire a token against 1 ms of prefill, so 1.5 ms are seen."""
    even = break_even(ground(0.4e6), lengths=(64, 1024))
    assert even.toll_s[1] > even.stall_s[1]
    assert even.tokens_at_par is None


def test_it_may_pay_from_the_start() -> None:
    assert break_even(ground(1e9), lengths=(256, 512)).tokens_at_par == 256
