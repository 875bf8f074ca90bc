"""The router's end: who is inside finishes, who comes is sent away, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet

from tollbridge.errors import UnavailableError


class Drain:
    """Watches `inside`, the ids of the requests that the router has taken. Whoever removes one calls `left`."""

    def __init__(self, inside: AbstractSet[str]) -> None:
        self._inside = inside
        self._empty = asyncio.Event()
        self.has_begun = False

    def check(self) -> None:
        """Raise UnavailableError once the router takes no more requests."""
        if self.has_begun:
            raise UnavailableError("This router is shutting down: send the request again, to another one if there is.")

    def left(self) -> None:
        if self.has_begun and not self._inside:
            self._empty.set()

    async def run(self, grace_s: float) -> bool:
        """Take no more requests and wait for those inside; False when some still are after `grace_s`."""
        self.has_begun = True
        self.left()
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
