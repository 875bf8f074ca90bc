"""Puts the dashboard into the router's application: an `Extension` of `router.app`.

/ui, /ui/...    the page; no key, for nothing in it is anybody's
/ui/events      server-sent events: `history` once, then `snapshot` twice a second; behind the API key
/ui/snapshot    one snapshot; behind the API key
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
from aiohttp import web

from tollbridge.errors import UnavailableError
from tollbridge.obs import memory
from tollbridge.router.app import OPEN_PATHS
from tollbridge.router.context import Context
from tollbridge.ui.hub import Hub
from tollbridge.ui.observe import history, observe
from tollbridge.ui.pages import HEADERS, PREFIX, pages, serve
from tollbridge.ui.snapshot import Snapshot

EVENTS, SNAPSHOT = "/ui/events", "/ui/snapshot"
WRITE_TIMEOUT_S = 30.0  # for a viewer that does not read
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def mount(app: web.Application, context: Context) -> None:
    """Add the page and its data to `app`."""
    board = Board(context)
    for path, page in pages().items():
        app.router.add_get(PREFIX + path, serve(page))
        app[OPEN_PATHS].add(PREFIX + path)
    app.router.add_get(PREFIX.rstrip("/"), _to_the_page)
    app[OPEN_PATHS].add(PREFIX.rstrip("/"))
    app.router.add_get(EVENTS, board.events)
    app.router.add_get(SNAPSHOT, board.snapshot)
    app.cleanup_ctx.append(board.lifespan)
    app.on_shutdown.append(board.close)


class Board:
    """The data behind the page."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._started_at = context.clock.wall()
        self._memory_limit_bytes = memory.limit_bytes()
        self.hub = Hub(self._picture)

    async def snapshot(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=msgspec.json.encode(self._observe()),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    async def events(self, request: web.Request) -> web.StreamResponse:
        if self.hub.is_full:
            raise UnavailableError("Too many people look at this router: try again later.")
        response = web.StreamResponse(headers=_HEADERS)
        with self.hub.viewer() as viewer:
            await response.prepare(request)
            try:
                await _write(response, _event("history", msgspec.json.encode(history(self._context))))
                async for picture in viewer.pictures():
                    await _write(response, picture)
                await response.write_eof()
            except ConnectionError:  # it left
                pass
            except TimeoutError:  # it reads no more, nor would it read an end
                if request.transport is not None:
                    request.transport.abort()
        return response

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self.hub.run(), name="dashboard")  # owned by the application
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def close(self, app: web.Application) -> None:
        """Let viewers go before the router waits for the requests that still run."""
        self.hub.close()

    def _observe(self) -> Snapshot:
        return observe(
            self._context,
            started_at=self._started_at,
            rss_bytes=memory.rss_bytes(),
            memory_limit_bytes=self._memory_limit_bytes,
        )

    def _picture(self) -> bytes:
        return _event("snapshot", msgspec.json.encode(self._observe()))


async def _to_the_page(request: web.Request) -> web.StreamResponse:
    return web.Response(status=308, headers={**HEADERS, "Location": "ui/"})


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        await response.write(data)


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
