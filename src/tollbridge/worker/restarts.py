"""When a child that ended may be started again. Pure: the caller has the clock.

Each end in a row doubles the pause; a life that was long enough begins a new row. A start-up failure (exit code 3)
would only be repeated, so it is the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from tollbridge.errors import StartupError


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How patient a supervisor is."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    max_in_a_row: int = 5
    settled_s: float = 60.0  # who lived so long is no crash loop


class Restarts:
    """Counts the ends of one child. Times are seconds of one monotonic clock."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.in_a_row = 0
        self.total = 0

    def maybe_pause_s(self, returncode: int | None, started_s: float, now_s: float) -> float | None:
        """Return how long to wait before the next start, None when there is to be none."""
        if now_s - started_s >= self._policy.settled_s:
            self.in_a_row = 0
        if returncode == StartupError.exit_code or self.in_a_row >= self._policy.max_in_a_row:
            return None
        pause_s = min(self._policy.first_pause_s * 2**self.in_a_row, self._policy.longest_pause_s)
        self.in_a_row += 1
        self.total += 1
        return pause_s
