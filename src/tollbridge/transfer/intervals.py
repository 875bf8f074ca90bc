"""A set of tokens as sorted disjoint ranges: which tokens of one layer have arrived."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise


class IntervalSet:
    """Half-open integer ranges; adding is O(log n + merged), and n stays 1 when ranges arrive in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._size = 0

    def __len__(self) -> int:
        """Return how many integers are in the set."""
        return self._size

    def add(self, start: int, end: int) -> int:
        """Add [start, end) and return how many integers are new."""
        if start >= end:
            return 0
        low = bisect_left(self._ends, start)  # first range that touches [start, end)
        high = bisect_right(self._starts, end)  # one past the last one
        merged_start, merged_end, known = start, end, 0
        if low < high:
            merged_start = min(start, self._starts[low])
            merged_end = max(end, self._ends[high - 1])
            known = sum(self._ends[i] - self._starts[i] for i in range(low, high))
        self._starts[low:high] = [merged_start]
        self._ends[low:high] = [merged_end]
        added = merged_end - merged_start - known
        self._size += added
        return added

    def covers(self, start: int, end: int) -> bool:
        """Return whether all of [start, end) is in the set."""
        if start >= end:
            return True
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and end <= self._ends[index]

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges, sorted."""
        return list(zip(self._starts, self._ends, strict=True))

    def check(self) -> None:
        """Raise AssertionError unless the ranges are sorted, disjoint, not adjacent, and counted."""
        ranges = self.ranges()
        assert all(start < end for start, end in ranges)
        assert all(left[1] < right[0] for left, right in pairwise(ranges))
        assert self._size == sum(end - start for start, end in ranges)
