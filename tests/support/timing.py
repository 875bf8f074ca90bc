"""Bounds on time that a busy machine does not break.

What is late because others had the cores is on time now and then; what is late by its making never is. So the best of a
few measurements is held against a bound, and more are made only while none has met it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

TRIES = 25


async def once_below(bound: float, measure: Callable[[], Awaitable[float]]) -> None:
    """Measure until one result is below the bound; AssertionError when none is."""
    found: list[float] = []
    while not found or found[-1] >= bound:
        assert len(found) < TRIES, f"never below {bound}: {found}"
        found.append(await measure())
