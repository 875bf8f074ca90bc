"""The one place that the engine's thread and a medium's I/O thread share: who is active, who has ended, the counters.

A transfer enters once (`begin`) and ends once (`end`); `poll` hands each end out once. That is the contract's "ends
exactly once", kept here for every medium.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

from tollbridge.errors import TransferError
from tollbridge.transfer.base import TransferEnd, TransferStatistics

_RECENT = 16  # transfers whose goodput is reported


class Ledger:
    """Thread-safe. An id is active from `begin` until `poll` returns its end."""

    def __init__(self, medium: str, *, io: Literal["threads", "process"] = "threads") -> None:
        self._medium = medium
        self._io = io
        self._lock = threading.Lock()
        self._active: set[str] = set()
        self._ended: list[TransferEnd] = []
        self._outcomes: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._payload_bytes = 0
        self._wire_bytes = 0
        self._bytes_by_medium: Counter[str] = Counter()
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)  # (payload bytes, wire seconds)
        self._notify: Callable[[], None] = _ignore
        self._closed = False

    def begin(self, transfer_id: str) -> None:
        """Enter a transfer; TransferError when that id is active or the medium is closed."""
        with self._lock:
            if self._closed:
                raise TransferError(f"Transfer {transfer_id} cannot start: this medium is closed.")
            if transfer_id in self._active:
                raise TransferError(f"Transfer {transfer_id} is already active on this side: ids are used once.")
            self._active.add(transfer_id)

    def end(self, end: TransferEnd) -> None:
        """Record the end of an active transfer and wake the engine."""
        with self._lock:
            assert end.transfer_id in self._active, f"{end.transfer_id} ended without being active"
            assert all(other.transfer_id != end.transfer_id for other in self._ended), f"{end.transfer_id} ended twice"
            self._ended.append(end)
            self._count(end)
        self._notify()

    def poll(self) -> list[TransferEnd]:
        """Return the ends since the last call; their ids may be used again."""
        with self._lock:
            ended, self._ended = self._ended, []
            self._active.difference_update(end.transfer_id for end in ended)
            return ended

    def set_listener(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def close(self) -> None:
        """Refuse new transfers from now on."""
        with self._lock:
            self._closed = True

    def statistics(self, num_connections: int, by_medium: dict[str, int] | None = None) -> TransferStatistics:
        with self._lock:
            wire_s = sum(seconds for _, seconds in self._recent)
            return TransferStatistics(
                medium=self._medium,
                active=len(self._active) - len(self._ended),
                done=self._outcomes["done"],
                failed=self._outcomes["failed"],
                cancelled=self._outcomes["cancelled"],
                payload_bytes=self._payload_bytes,
                wire_bytes=self._wire_bytes,
                num_connections=num_connections,
                goodput_bytes_per_s=sum(size for size, _ in self._recent) / wire_s if wire_s > 0 else 0.0,
                failures_by_reason=dict(self._reasons),
                num_connections_by_medium=by_medium or {},
                payload_bytes_by_medium=dict(self._bytes_by_medium),
                io=self._io,
            )

    def active(self) -> frozenset[str]:
        """Return the ids that have begun and not ended."""
        with self._lock:
            return frozenset(self._active - {end.transfer_id for end in self._ended})

    def check(self) -> None:
        """Raise AssertionError unless every reported end is still active and unique."""
        with self._lock:
            ids = [end.transfer_id for end in self._ended]
            assert len(ids) == len(set(ids)), "a transfer ended twice"
            assert set(ids) <= self._active, "a transfer ended without being active"

    def _count(self, end: TransferEnd) -> None:
        self._outcomes[end.outcome] += 1
        if end.outcome == "failed":
            self._reasons[end.reason] += 1
        self._payload_bytes += end.payload_bytes
        self._wire_bytes += end.wire_bytes
        if end.payload_bytes:
            self._bytes_by_medium[end.medium] += end.payload_bytes
        if end.payload_bytes and end.wire_s > 0:
            self._recent.append((end.payload_bytes, end.wire_s))


def _ignore() -> None:
    """Stand in for a listener until the engine sets one."""
