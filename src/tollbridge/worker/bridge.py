"""Step outputs from the engine's thread to the event loop, one wake-up per burst.

The engine calls a request's sink after each step. The first output of a burst wakes the loop; those that follow before
the loop gets its turn ride along, so a step with 64 requests costs about one wake-up, not 64. What waits here is
bounded by the request's `max_tokens`.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tollbridge.clock import Clock
from tollbridge.engine.base import StepOutput

Timed = tuple[StepOutput, float]  # and the monotonic second at which the engine handed it over


class OutputStream:
    """The outputs of one request; `sink` belongs to the engine's thread, the rest to the event loop."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._ready: list[Timed] = []
        self._waiter: asyncio.Future[None] | None = None

    def sink(self, output: StepOutput) -> None:
        self._bridge.post(self, output)

    async def next(self) -> list[Timed]:
        """Wait for at least one output; return all since the last call, in order."""
        if not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        ready, self._ready = self._ready, []
        return ready

    def put(self, timed: Timed) -> None:
        self._ready.append(timed)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Bridge:
    """One per event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._posted: deque[tuple[OutputStream, Timed]] = deque()
        self._woken = False

    def open(self) -> OutputStream:
        return OutputStream(self)

    def post(self, stream: OutputStream, output: StepOutput) -> None:
        """Hand an output over (engine thread). Never raises: outputs for a closed loop have no reader."""
        self._posted.append((stream, (output, self._clock.monotonic())))
        if self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed
            self._posted.clear()

    def _deliver(self) -> None:
        # Lowered before draining: an output posted from here on wakes the loop again, so none is left behind.
        self._woken = False
        while self._posted:
            stream, timed = self._posted.popleft()
            stream.put(timed)
