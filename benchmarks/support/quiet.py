"""A machine that others use too: wait, before a repetition, until they leave the cores alone, and say how it went."""

from __future__ import annotations

import time
from pathlib import Path

_QUIET_SHARE = 0.1  # of the time of all cores
_WINDOW_S = 0.3
_PATIENCE_S = 60.0  # of a whole run: then it goes on as it is


class Quiet:
    """Call `wait` before each repetition; nothing of this run may be busy meanwhile."""

    def __init__(self) -> None:
        self._left_s = _PATIENCE_S
        self._shares: list[float] = []

    def wait(self) -> None:
        share = _busy_share()
        while share > _QUIET_SHARE and self._left_s > 0:
            self._left_s -= _WINDOW_S
            share = _busy_share()
        self._shares.append(share)

    def __str__(self) -> str:
        num_quiet = sum(share <= _QUIET_SHARE for share in self._shares)
        worst = max(self._shares, default=0.0)
        return (
            f"{num_quiet} of {len(self._shares)} repetitions began on a quiet machine, the worst with {worst:.0%} busy"
        )


def _busy_share() -> float:
    """Return the share of the time of all cores that is not idle, over the next moment."""
    before = _times()
    time.sleep(_WINDOW_S)
    idle, total = (now - then for now, then in zip(_times(), before, strict=True))
    return 1 - idle / total if total else 0.0


def _times() -> tuple[int, int]:
    """Return the ticks that all cores were idle, and all ticks (proc(5), stat)."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
