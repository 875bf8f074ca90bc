"""Sends the messages that free KV which nobody will fetch.

A split can end after its prefill leg is complete and before decode has asked for the KV: the client left early, or the
decode worker died. The prefill worker would pin the blocks until its timeout; one small message (`splits.py` knows to
whom) frees them an engine step later. It is best effort: a worker that does not know it keeps to its timeout.
"""

from __future__ import annotations

import asyncio
import logging

from tollbridge.errors import TollbridgeError
from tollbridge.router.fleet import Worker
from tollbridge.router.upstream import Upstream

log = logging.getLogger("tollbridge.router")

MAX_PENDING = 256  # messages under way; beyond it the workers' own timeouts must do
TIMEOUT_S = 2.0


class Releaser:
    """Owns the messages under way. `close` ends them."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, worker: Worker, path: str, body: bytes, *, transfer: str) -> None:
        """Send `body` in the background; what is answered does not matter."""
        if len(self._tasks) >= MAX_PENDING:
            log.warning("release not sent: worker=%s transfer=%s too many under way", worker.name, transfer)
            return
        task = asyncio.create_task(self._send(worker, path, body, transfer), name="release-send")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what is still under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, worker: Worker, path: str, body: bytes, transfer: str) -> None:
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._upstream.request(worker, "POST", path, body=body, headers=headers) as response,
            ):
                await self._upstream.read(worker, response)
        except (TollbridgeError, TimeoutError) as error:
            log.debug("release failed: worker=%s transfer=%s %s", worker.name, transfer, error)
