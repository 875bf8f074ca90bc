"""A budget for second attempts, shared by all requests, so that no failure can turn into a storm of retries.

A token bucket without a clock: each request that comes in pays in a fraction of a token, each further attempt takes one
out. However bad it gets, workers see at most `burst + (1 + fraction) x requests` attempts. (Finagle's RetryBudget; its
floor of retries per second is left out, the full bucket at the start serves the quiet hours.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BudgetStatistics:
    tokens: float
    taken_total: int
    refused_total: int


class RetryBudget:
    def __init__(self, *, fraction: float, burst: int) -> None:
        self._fraction, self._burst = fraction, burst
        self._tokens = float(burst)
        self._taken_total = 0
        self._refused_total = 0

    def deposit(self) -> None:
        """A new request has come in."""
        self._tokens = min(self._tokens + self._fraction, float(self._burst))

    def withdraw(self) -> bool:
        """Return whether one more attempt may be made; if so it is paid for."""
        if self._tokens < 1.0:
            self._refused_total += 1
            return False
        self._tokens -= 1.0
        self._taken_total += 1
        return True

    def statistics(self) -> BudgetStatistics:
        return BudgetStatistics(tokens=self._tokens, taken_total=self._taken_total, refused_total=self._refused_total)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert 0.0 <= self._tokens <= self._burst
