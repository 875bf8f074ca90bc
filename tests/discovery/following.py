"""Runs a discovery in the background and waits for what it tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from tollbridge.discovery.base import Discovery, Endpoint

PATIENCE_S = 60.0


class Following:
    def __init__(self, discovery: Discovery) -> None:
        self.discovery = discovery
        self.told: list[list[Endpoint]] = []
        self._changed = asyncio.Event()

    def tell(self, endpoints: Sequence[Endpoint]) -> None:
        self.told.append(list(endpoints))
        self._changed.set()

    @property
    def now(self) -> dict[str, str]:
        """Name and standing of those told last."""
        return {endpoint.name: endpoint.standing for endpoint in self.told[-1]} if self.told else {}

    async def until(self, wanted: dict[str, str]) -> None:
        """Wait until what it told last is `wanted`."""
        async with asyncio.timeout(PATIENCE_S):
            while self.now != wanted:
                self._changed.clear()
                await self._changed.wait()

    async def sees(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, which no call announces."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def following(discovery: Discovery) -> AsyncIterator[Following]:
    """Run `discovery` while the context lasts; it must end at once when it is cancelled."""
    seen = Following(discovery)
    task = asyncio.create_task(discovery.run(seen.tell))
    try:
        yield seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            async with asyncio.timeout(10.0):
                await task
