from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.cost.link import LinkModel, proven

MB = 1e6


def test_alone_and_slower_than_prefill_is_exact() -> None:
    assert proven(10 * MB, 1.0, num_sharing=1, prefill_s=0.3) == (10 * MB, 10 * MB)


def test_shared_proves_an_interval() -> None:
    assert proven(10 * MB, 1.0, num_sharing=3, prefill_s=0.3) == (10 * MB, 30 * MB)


def test_paced_by_prefill_proves_a_floor_only() -> None:
    assert proven(10 * MB, 1.0, num_sharing=1, prefill_s=1.0) == (10 * MB, math.inf)


def test_too_little_proves_nothing() -> None:
    assert proven(1000, 1.0, num_sharing=1, prefill_s=0.0) is None
    assert proven(1e6, 0.0, num_sharing=1, prefill_s=0.0) is None


def test_converges_and_gets_sure() -> None:
    link = LinkModel()
    for _ in range(20):
        link.observe(10 * MB, 10 * MB)
    assert link.goodput_bytes_per_s == pytest.approx(10 * MB)
    assert link.spread < 0.06


def test_sharing_that_we_cause_is_no_slower_link() -> None:
    """Four transfers at once over a link of 100 MB/s see 25 each: nothing is learnt from it."""
    link = LinkModel(100 * MB)
    for _ in range(50):
        interval = proven(10 * MB, 0.4, num_sharing=4, prefill_s=0.1)
        assert interval is not None
        link.observe(*interval)
    assert link.goodput_bytes_per_s == 100 * MB


def test_waiting_for_prefill_is_no_slower_link() -> None:
    link = LinkModel(100 * MB)
    link.observe(*proven(10 * MB, 2.0, num_sharing=1, prefill_s=2.0) or (0, 0))
    assert link.goodput_bytes_per_s == 100 * MB


def test_the_best_rate_stands_until_something_proves_a_most() -> None:
    """A short prompt of a GPU proves a tenth of what a fast link carries."""
    link = LinkModel()
    for rate in (200 * MB, 700 * MB, 1000 * MB, 800 * MB):
        link.observe(rate)
    assert link.goodput_bytes_per_s == 1000 * MB
    assert not link.is_bounded
    link.observe(900 * MB, 900 * MB)
    assert link.is_bounded
    assert 900 * MB < link.goodput_bytes_per_s < 1000 * MB
    link.observe(2000 * MB)
    assert link.goodput_bytes_per_s < 1700 * MB, "one may be a mistake"


def test_one_transfer_that_was_timed_wrong_raises_what_nothing_bounds_at_most_fourfold() -> None:
    link = LinkModel()
    link.observe(2 * MB)  # with a connection to be made first
    link.observe(20 * MB)
    assert link.goodput_bytes_per_s == 20 * MB
    link.observe(5000 * MB)
    assert link.goodput_bytes_per_s == 80 * MB


def test_a_link_that_really_got_slower_is_noticed() -> None:
    link = LinkModel(100 * MB)
    for _ in range(10):
        link.observe(*proven(10 * MB, 1.0, num_sharing=1, prefill_s=0.1) or (0, 0))
    assert link.goodput_bytes_per_s == pytest.approx(10 * MB, rel=0.1)


def test_a_link_that_fell_by_orders_of_magnitude_is_known_after_a_few_transfers() -> None:
    """Where the first one might have been a hiccup, which costs less than half."""
    link = LinkModel(1000 * MB)
    link.observe(1 * MB, 1 * MB)
    assert link.goodput_bytes_per_s == pytest.approx(600 * MB, rel=0.01)
    for _ in range(4):
        link.observe(1 * MB, 1 * MB)
    assert link.goodput_bytes_per_s < 1.5 * MB
    link.observe(1000 * MB)
    assert link.goodput_bytes_per_s > 500 * MB, "and back"


def test_several_transfers_that_one_hiccup_held_up_are_no_slower_link() -> None:
    """Each shared the path with the others, and proves at most four times its rate."""
    link = LinkModel(1000 * MB)
    for _ in range(4):
        link.observe(2 * MB, 8 * MB)
    assert link.goodput_bytes_per_s > 130 * MB


def test_a_faster_one_at_once() -> None:
    link = LinkModel(10 * MB)
    for _ in range(3):
        link.observe(100 * MB)
    assert link.goodput_bytes_per_s > 90 * MB


@given(st.lists(st.tuples(st.floats(1.0, 1e10), st.floats(1.0, 20.0) | st.just(math.inf)), min_size=1))
def test_stays_between_what_was_proven(samples: list[tuple[float, float]]) -> None:
    link = LinkModel()
    for low, sharing in samples:
        link.observe(low, low * sharing)
    assert min(low for low, _ in samples) * 0.999 <= link.goodput_bytes_per_s
    most = max(low if sharing == math.inf else low * sharing for low, sharing in samples)
    assert link.goodput_bytes_per_s <= most * 1.001
