"""The event loop of the simulation: a heap of callbacks, and the clock that they see."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]
COMMAND, STEP = 0, 1  # of two events at one time, what arrives comes before a step that ends


class Agenda:
    """Runs actions in order of time, rank, and of having been planned. It is the `Clock` of everything simulated."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, int, Action]] = []
        self._planned = 0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s

    def at(self, time_s: float, action: Action, rank: int = COMMAND) -> None:
        """Plan `action`; a time that has passed means now."""
        self._planned += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), rank, self._planned, action))

    def run(self, until: Callable[[], bool]) -> None:
        """Run until nothing is planned, or `until` says so (asked after every event)."""
        heap = self._heap
        while heap:
            self.now_s, _, _, action = heapq.heappop(heap)
            self.num_events += 1
            action()
            if until():
                return
