"""Interval sets against plain sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tollbridge.transfer.intervals import IntervalSet

ranges = st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(ranges, max_size=30), ranges)
def test_against_a_set(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    model: set[int] = set()
    intervals = IntervalSet()
    for start, end in added:
        new = set(range(start, end)) - model
        assert intervals.add(start, end) == len(new)
        model |= new
        intervals.check()
        assert len(intervals) == len(model)
    assert {i for start, end in intervals.ranges() for i in range(start, end)} == model
    assert intervals.covers(*asked) == (set(range(*asked)) <= model)


def test_in_order_it_stays_one_range() -> None:
    intervals = IntervalSet()
    for start in range(0, 100, 10):
        intervals.add(start, start + 10)
    assert intervals.ranges() == [(0, 100)]
