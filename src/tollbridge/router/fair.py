"""Who comes next when there is not room for all: start-time fair queueing over tenants. Pure.

Each waiting request gets a tag, the virtual time at which its tenant's share would let it start; the least tag comes
next. A tenant that sends a thousand requests only moves its own tags away; one that was idle begins at the present and
owes nothing. Shares are by weight, and of estimated work, not of requests. (Goyal, Vin, Cheng: Start-time Fair
Queueing, SIGCOMM 1996.) Within a tenant, lower `priority` comes first, then who came first: a tenant can put its own
requests in order, but cannot pass others by it.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Tenant(Generic[T]):
    weight: float
    next_start: float = 0.0  # virtual time at which its next request starts
    waiting: list[tuple[int, int, float, T]] = field(default_factory=list)  # heap: priority, serial, work, item


class FairQueue(Generic[T]):
    """Holds what waits. `pop` is O(tenants that wait)."""

    def __init__(self, weights: dict[str, float]) -> None:
        self._tenants: dict[str, _Tenant[T]] = {name: _Tenant(weight) for name, weight in weights.items()}
        self._serial = itertools.count()
        self._now = 0.0  # virtual time: the start tag of the last one that left
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, tenant: str, item: T, *, work: float, priority: int = 0) -> None:
        """Let `item` wait; `work` is positive, in any unit."""
        queue = self._tenants[tenant]
        if not queue.waiting:
            queue.next_start = max(queue.next_start, self._now)
        heapq.heappush(queue.waiting, (priority, next(self._serial), work, item))
        self._size += 1

    def pop(self) -> T:
        """Return who comes next; IndexError when nobody waits."""
        waiting = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if not waiting:
            raise IndexError("the queue is empty")
        tenant = min(waiting, key=lambda one: one.next_start)
        _, _, work, item = heapq.heappop(tenant.waiting)
        self._now = tenant.next_start
        tenant.next_start += work / tenant.weight
        self._size -= 1
        return item

    def remove(self, tenant: str, item: T) -> bool:
        """Take out one that no longer wants to wait; False when it has left already."""
        queue = self._tenants[tenant]
        left = [entry for entry in queue.waiting if entry[3] is not item]
        if len(left) == len(queue.waiting):
            return False
        queue.waiting = left
        heapq.heapify(queue.waiting)
        self._size -= 1
        return True

    def push_out(self, tenant: str) -> T | None:
        """Take out the last request of whoever has most waiting for its weight, so that one of `tenant` may wait.

        None when `tenant` would then have as many itself.
        """
        longest = max(self._tenants.values(), key=lambda one: len(one.waiting) / one.weight)
        mine = self._tenants[tenant]
        if len(longest.waiting) / longest.weight <= (len(mine.waiting) + 1) / mine.weight:
            return None
        last = max(longest.waiting)
        longest.waiting.remove(last)
        heapq.heapify(longest.waiting)
        self._size -= 1
        return last[3]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self._size == sum(len(tenant.waiting) for tenant in self._tenants.values())
