"""Tells prefill workers about sends that nobody will fetch.

A split can end after its prefill leg is complete and before decode has asked for the KV: the client left early, or the
decode worker died. The prefill worker would pin the blocks until its open timeout; one small signed message frees them
an engine step later. It is best effort: a worker that does not know the path (stock vLLM) keeps to its timeout.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from tollbridge.errors import TollbridgeError
from tollbridge.router.fleet import Worker
from tollbridge.router.upstream import Upstream
from tollbridge.wire.params import RELEASE_PATH, TransferParams

log = logging.getLogger("tollbridge.router")

MAX_PENDING = 256  # messages under way; beyond it the workers' own timeouts must do
TIMEOUT_S = 2.0


class Releaser:
    """Owns the messages under way. `close` ends them."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, worker: Worker, params: TransferParams) -> None:
        """Send the message in the background."""
        if len(self._tasks) >= MAX_PENDING:
            log.warning("release not sent: worker=%s transfer=%s too many under way", worker.name, params.transfer_id)
            return
        task = asyncio.create_task(self._send(worker, params), name="release-send")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what is still under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, worker: Worker, params: TransferParams) -> None:
        body = msgspec.json.encode({"kv_transfer_params": {"tollbridge": params}})
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._upstream.request(worker, "POST", RELEASE_PATH, body=body, headers=headers) as response,
            ):
                await self._upstream.read(worker, response)
        except (TollbridgeError, TimeoutError) as error:
            log.debug("release failed: worker=%s transfer=%s %s", worker.name, params.transfer_id, error)
