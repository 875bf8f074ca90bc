"""KV cache events on their way to the publisher: a bounded queue.

Nobody may be listening, or too slowly. Beyond the bound the log forgets what it holds and says AllBlocksCleared
instead: a listener then knows less than is cached (it misses hits), and never more.
"""

from __future__ import annotations

from tollbridge.wire.events import AllBlocksCleared, KVEvent


class EventLog:
    """Events since the last `take`, at most `capacity` of them."""

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._events: list[KVEvent] = []
        self.num_overflows = 0

    def append(self, event: KVEvent) -> None:
        """Add an event; on overflow everything before it becomes one AllBlocksCleared."""
        if len(self._events) >= self._capacity:
            self._events = [AllBlocksCleared()]
            self.num_overflows += 1
        self._events.append(event)

    def take(self) -> list[KVEvent]:
        """Return and forget the events, oldest first."""
        events, self._events = self._events, []
        return events
