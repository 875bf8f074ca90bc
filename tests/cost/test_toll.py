"""The recursion of the design and its closed form, and the facts that everybody can check by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.cost.toll import last_arrival_closed_s, last_arrival_s, visible_s

POSITIVE = st.floats(1e-3, 1e3)


@given(st.integers(1, 200), POSITIVE, POSITIVE, POSITIVE, st.floats(0, 1e3), st.floats(0, 0.99))
def test_closed_form_equals_recursion(
    num_pieces: int, compute_s: float, num_bytes: float, goodput: float, ready_bytes: float, idle_share: float
) -> None:
    """Equal layers: with bytes that are there already, and with a first part that decode does not need."""
    idle_s = idle_share * compute_s
    piece_s = (compute_s - idle_s) / num_pieces
    pieces = [(idle_s + (k + 1) * piece_s, num_bytes / num_pieces) for k in range(num_pieces)]
    exact = last_arrival_s([(0.0, ready_bytes), *pieces], goodput)
    closed = last_arrival_closed_s(
        num_bytes, goodput, compute_s=compute_s, num_pieces=num_pieces, ready_bytes=ready_bytes, idle_s=idle_s
    )
    assert closed == pytest.approx(exact, rel=1e-9)


@given(st.integers(1, 200), POSITIVE, POSITIVE, POSITIVE)
def test_visible_part_is_the_published_formula(num_pieces: int, compute_s: float, x: float, goodput: float) -> None:
    expected = max(x / (num_pieces * goodput), x / goodput - compute_s * (1 - 1 / num_pieces))
    assert visible_s(x, goodput, compute_s=compute_s, num_pieces=num_pieces) == pytest.approx(
        expected, rel=1e-6, abs=1e-9 * (compute_s + x / goodput)
    )


def test_a_fast_link_shows_one_layer_only() -> None:
    assert visible_s(1e6, 1e9, compute_s=1.0, num_pieces=10) == pytest.approx(1e-4)


def test_nothing_to_ship_costs_nothing() -> None:
    assert visible_s(0.0, 1e6, compute_s=1.0, num_pieces=10) == 0.0


def test_a_link_in_use_starts_late() -> None:
    assert last_arrival_s([(0.0, 10.0)], 10.0, start_s=2.0) == 3.0


def test_qwen_of_the_article_over_gigabit() -> None:
    """272 MB at 115 MB/s behind a prefill of 0.25 s: 2.1 to 2.4 s that everybody sees."""
    assert 2.1 < visible_s(272e6, 115e6, compute_s=0.25, num_pieces=28) < 2.4
