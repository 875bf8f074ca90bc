"""The clock seam: pure code takes a `Clock` as an argument, so tests and the simulator own time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. Both readings are in seconds."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary point; never goes backwards."""
        ...

    def wall(self) -> float:
        """Return seconds since the Unix epoch; may jump."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to; for tests and simulation."""

    def __init__(self, start_s: float = 1_000.0) -> None:
        self._now_s = start_s

    def monotonic(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` (must not be negative)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self._now_s += seconds
