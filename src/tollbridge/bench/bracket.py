"""Goodput by bisection, with its bracket: the highest rate that holds below the lowest that fails. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_RATE, MAX_RATE = 0.01, 10_000.0


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One rate, and whether a share of the requests that was asked for met the SLO."""

    rate: float
    holds: bool


def edges(tried: Sequence[Tried]) -> tuple[float, float]:
    """Return (highest rate that holds below the lowest that fails, that lowest one); 0 and infinity where none."""
    failed = min((each.rate for each in tried if not each.holds), default=math.inf)
    held = max((each.rate for each in tried if each.holds and each.rate < failed), default=0.0)
    return held, failed


def next_rate(tried: Sequence[Tried], first: float, steps: int) -> float | None:
    """Return the rate to try next: doubled or halved until there is a bracket, then its middle, `steps` times.

    None when the bracket is as narrow as was asked for, or there is none in reach.
    """
    if not tried:
        return first
    low, high = edges(tried)
    if high == math.inf:
        return low * 2 if low * 2 <= MAX_RATE else None
    if low == 0.0:
        return high / 2 if high / 2 >= MIN_RATE else None
    bracketed = next(n for n in range(1, len(tried) + 1) if _is_bracket(tried[:n]))
    return (low * high) ** 0.5 if len(tried) - bracketed < steps else None


def _is_bracket(tried: Sequence[Tried]) -> bool:
    low, high = edges(tried)
    return low > 0.0 and high < math.inf
