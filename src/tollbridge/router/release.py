"""What outlives a request: messages that free KV which nobody will fetch, and legs that have to run to their end.

A split can end after its prefill leg is complete and before decode has asked for the KV: the client left early, or the
decode worker died. The prefill worker would pin the blocks until its timeout; one small message (`splits.py` knows to
whom) frees them an engine step later. It is best effort: a worker that does not know it keeps to its timeout.

Where no message helps, since decode waits for KV until prefill has written it, the prefill leg goes on instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TypeVar

from tollbridge.errors import TollbridgeError
from tollbridge.router.fleet import Worker
from tollbridge.router.upstream import Upstream

log = logging.getLogger("tollbridge.router")

MAX_PENDING = 256  # messages and legs under way; beyond it the workers' own timeouts must do
TIMEOUT_S = 2.0

T = TypeVar("T")


class Releaser:
    """Owns what is under way. `close` ends it."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[object]] = set()
        self._legs: set[asyncio.Task[object]] = set()  # those of them that are no messages

    def send(self, worker: Worker, path: str, body: bytes, *, transfer: str) -> None:
        """Send `body` in the background; what is answered does not matter."""
        if len(self._tasks) >= MAX_PENDING:
            log.warning("release not sent: worker=%s transfer=%s too many under way", worker.name, transfer)
            return
        self._own(asyncio.create_task(self._send(worker, path, body, transfer), name="release-send"))

    async def outlive(self, leg: Coroutine[object, object, T]) -> T:
        """Return what `leg` returns; when the caller is cancelled, it goes on here, unless too much is under way."""
        task = asyncio.create_task(leg, name="outliving-leg")
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            self._own(task)
            self._legs.add(task)
            if len(self._tasks) > MAX_PENDING:
                log.warning("leg ended with its request: too many go on")
                task.cancel()
            raise
        return task.result()

    def _own(self, task: asyncio.Task[object]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        self._legs.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, TollbridgeError):
            log.error("outliving leg failed", exc_info=error)

    async def close(self) -> None:
        """Let the messages go out, which takes `TIMEOUT_S` at most; cancel the legs that are still under way."""
        for leg in self._legs:
            leg.cancel()
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
