"""Which cases fit into the time there is: cases grow until the next one would not, then all are repeated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tollbridge.clock import Clock

T = TypeVar("T")
_GROWTH = 1.3  # exponent: what a case that is twice as large is expected to take, on the safe side of linear


async def survey(
    cases: Sequence[int],
    measure: Callable[[int], Awaitable[T]],
    *,
    repeats: int,
    share_s: float,
    clock: Clock,
    at_least: int = 2,
) -> dict[int, list[T]]:
    """Measure `cases`, smallest first, and return the results by case.

    The first round leaves out what would not fit `repeats` times into `share_s` (but has `at_least` cases); later
    rounds go through all of them again, so that a machine which slows down does so for every case, and end with the
    time.
    """
    begun_s = clock.monotonic()
    results: dict[int, list[T]] = {}
    took_s: dict[int, float] = {}
    for case in sorted(cases):
        if len(took_s) >= at_least and repeats * (sum(took_s.values()) + _expected(case, took_s)) > share_s:
            break
        at_s = clock.monotonic()
        results[case] = [await measure(case)]
        took_s[case] = clock.monotonic() - at_s
    for _ in range(repeats - 1):
        for case in results:
            if clock.monotonic() - begun_s + took_s[case] <= share_s:
                results[case].append(await measure(case))
    return results


def _expected(case: int, took_s: dict[int, float]) -> float:
    last = max(took_s)
    return float(took_s[last] * (case / last) ** _GROWTH)
