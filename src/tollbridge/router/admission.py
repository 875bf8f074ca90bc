"""① How many requests are in flight, and who waits for a place: bounded in number, in bytes and in time.

A request holds a place from here to its end, never while its body is still on the way. When all places are taken it
waits, fairly among tenants (`fair`); when too many wait, or it waited too long, it is refused with a Retry-After that
says when a place should be free, from the rate at which places became free lately. A tenant that fills the queue keeps
nobody out of it: its last request is refused in favour of a tenant with fewer.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tollbridge.clock import Clock
from tollbridge.errors import DeadlineError, OverloadedError, UnavailableError
from tollbridge.router.fair import FairQueue

_NUM_RECENT = 64  # ends that the drain rate is taken from
_LONGEST_ADVICE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class AdmissionStatistics:
    in_flight: int
    waiting: int
    waiting_bytes: int


@dataclass(eq=False)
class _Place:
    """A request that waits; `given` is done once it has its place."""

    given: asyncio.Future[None]
    num_bytes: int
    pushed_out: bool = False  # by a tenant that has fewer waiting; then `given` is done as well


class Admission:
    """Belongs to one event loop."""

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        clock: Clock,
        max_in_flight: int,
        max_waiting: int,
        max_waiting_bytes: int,
    ) -> None:
        self._clock = clock
        self._max_in_flight, self._max_waiting = max_in_flight, max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._queue: FairQueue[_Place] = FairQueue(dict(weights))
        self._waiting_bytes = 0
        self._in_flight = 0
        self._ends_s: deque[float] = deque(maxlen=_NUM_RECENT)

    @asynccontextmanager
    async def place(
        self,
        tenant: str,
        *,
        work: float,
        num_bytes: int,
        patience_s: float,
        left_s: float | None = None,
        priority: int = 0,
    ) -> AsyncIterator[float]:
        """Hold a place, and yield the seconds that were waited for it, at most `patience_s`.

        OverloadedError (429) when too many wait already, UnavailableError (503) when it waited too long, DeadlineError
        (504) when its own deadline, `left_s` from now, has passed before.
        """
        if left_s is not None and left_s <= 0.0:
            raise self._too_late()
        waited_s = 0.0
        if self._in_flight < self._max_in_flight and not self._queue:
            self._in_flight += 1
        else:
            self._make_room(tenant, num_bytes)
            place = _Place(asyncio.get_running_loop().create_future(), num_bytes)
            self._queue.push(tenant, place, work=work, priority=priority)
            waited_s = await self._wait(tenant, place, patience_s, left_s)
        try:
            yield waited_s
        finally:
            self._ends_s.append(self._clock.monotonic())
            self._in_flight -= 1
            self._hand_on()

    def retry_after_s(self) -> float:
        """Return when a newcomer should find a place, by the rate of the last ends; 1 s when nobody knows."""
        if len(self._ends_s) < 2:
            return 1.0
        elapsed_s = max(self._clock.monotonic() - self._ends_s[0], 1e-3)
        rate = len(self._ends_s) / elapsed_s
        return float(min(max(math.ceil((len(self._queue) + 1) / rate), 1), _LONGEST_ADVICE_S))

    def statistics(self) -> AdmissionStatistics:
        return AdmissionStatistics(
            in_flight=self._in_flight, waiting=len(self._queue), waiting_bytes=self._waiting_bytes
        )

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self._queue.check()
        assert 0 <= self._in_flight <= self._max_in_flight
        assert not self._queue or self._in_flight == self._max_in_flight, "nobody waits while a place is free"
        assert self._waiting_bytes >= 0

    def _make_room(self, tenant: str, num_bytes: int) -> None:
        """Let one more wait. Where too many do, the tenant with most for its weight gives up its last one."""
        if self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise self._overloaded()
        if len(self._queue) < self._max_waiting:
            return
        last = self._queue.push_out(tenant)
        if last is None:
            raise self._overloaded()
        last.pushed_out = True
        if not last.given.done():
            last.given.set_result(None)

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(
            f"The router has {self._in_flight} requests in flight and {len(self._queue)} waiting, its bounds: "
            "try again later.",
            retry_after_s=self.retry_after_s(),
        )

    def _too_late(self) -> DeadlineError:
        return DeadlineError(
            f"The request's deadline passed before it had one of the router's {self._max_in_flight} places.",
            retry_after_s=self.retry_after_s(),
        )

    async def _wait(self, tenant: str, place: _Place, patience_s: float, left_s: float | None) -> float:
        started_s = self._clock.monotonic()
        self._waiting_bytes += place.num_bytes
        try:
            async with asyncio.timeout(patience_s if left_s is None else min(patience_s, left_s)):
                await place.given
        except TimeoutError:
            self._leave(tenant, place)
            if left_s is not None and left_s <= patience_s:
                raise self._too_late() from None
            raise UnavailableError(
                f"The request waited {patience_s:g} s for one of the router's {self._max_in_flight} places: "
                "try again later.",
                retry_after_s=self.retry_after_s(),
            ) from None
        except asyncio.CancelledError:
            self._leave(tenant, place)
            raise
        finally:
            self._waiting_bytes -= place.num_bytes
        if place.pushed_out:
            raise self._overloaded()
        return self._clock.monotonic() - started_s

    def _leave(self, tenant: str, place: _Place) -> None:
        """Give up waiting. A place that was given at the same moment goes to the next."""
        if not place.pushed_out and not self._queue.remove(tenant, place):
            self._in_flight -= 1
            self._hand_on()

    def _hand_on(self) -> None:
        while self._queue and self._in_flight < self._max_in_flight:
            place = self._queue.pop()
            if not place.given.done():  # cancelled a moment ago; `_leave` finds it gone, so count it all the same
                place.given.set_result(None)
            self._in_flight += 1
