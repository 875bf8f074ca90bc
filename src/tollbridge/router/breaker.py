"""A circuit breaker for one worker. Pure: the caller says what time it is.

    CLOSED ──failure──> OPEN ──time──> HALF-OPEN ──success──> CLOSED
                         ^                 │
                         └─────failure─────┘   each time twice as long, up to `longest_s`

CLOSED     requests pass
OPEN       nobody is sent here while others can serve
HALF-OPEN  one request at a time, the probe; how it ends decides

One failure opens it, for a short time: a worker that has just broken off an answer is a bad choice for the next one,
and the price of being wrong is a fraction of a second. Failures that come together (every stream of a dying worker)
count as one. A probe that ends without a verdict (its client left) makes way for the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "open", "half_open"]


@dataclass(frozen=True, kw_only=True)
class BreakerStatistics:
    opened_total: int
    probes_total: int


class Breaker:
    """All times are monotonic seconds of one clock."""

    def __init__(self, *, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._pause_s = first_s  # of the next time it opens
        self._open_until_s: float | None = None  # None: closed
        self._probe: object | None = None  # the request that is out
        self._opened_total = 0
        self._probes_total = 0

    def state(self, now_s: float) -> State:
        if self._open_until_s is None:
            return "closed"
        return "open" if now_s < self._open_until_s else "half_open"

    def refuses(self, now_s: float) -> bool:
        """Return whether a request had better go elsewhere: it is open, or its probe is out."""
        if self._open_until_s is None:  # asked of every worker for every decision
            return False
        return now_s < self._open_until_s or self._probe is not None

    def begin(self, request: object, now_s: float) -> None:
        """A request goes to the worker. The first one in the half-open state is the probe."""
        if self.state(now_s) == "half_open" and self._probe is None:
            self._probe = request
            self._probes_total += 1

    def end(self, request: object) -> None:
        """That request has ended, however it did."""
        if self._probe is request:
            self._probe = None

    def failed(self, now_s: float) -> None:
        """A request failed by the worker's fault. While it is open this is no news."""
        if self.state(now_s) == "open":
            return
        self._open_until_s = now_s + self._pause_s
        self._pause_s = min(self._pause_s * 2, self._longest_s)
        self._probe = None
        self._opened_total += 1

    def succeeded(self) -> None:
        """A request went well, or the worker came back as a new process: close."""
        self._open_until_s = None
        self._pause_s = self._first_s
        self._probe = None

    def statistics(self) -> BreakerStatistics:
        return BreakerStatistics(opened_total=self._opened_total, probes_total=self._probes_total)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self._first_s <= self._pause_s <= self._longest_s
        assert self._probe is None or self._open_until_s is not None
