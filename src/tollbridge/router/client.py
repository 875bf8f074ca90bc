"""The client's side of one request: the head, the pieces, the end. A client that has left raises ClientGoneError.

The pieces of a stream bypass aiohttp: they are framed here and written to the transport, without a task or a coroutine
between the worker's socket and the client's. Head and end are aiohttp's, which so knows when the connection is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

from aiohttp import HttpVersion11, web

from tollbridge.router.upstream import ClientGoneError
from tollbridge.wire.connections import Connection

DECISION_HEADER = "x-tollbridge-decision"


class Client:
    """Sends one answer, streamed or whole. A client that takes nothing for `patience_s` is as good as gone."""

    def __init__(self, request: web.Request, *, patience_s: float) -> None:
        self._request = request
        self._patience_s = patience_s
        self._connection = cast(Connection, request.protocol)  # of `listening`'s own making
        self._transport: asyncio.WriteTransport | None = None
        self._is_chunked = request.version >= HttpVersion11
        self.response: web.StreamResponse | None = None  # set once the head is on its way

    @property
    def gone(self) -> bool:
        transport = self._request.transport
        return transport is None or transport.is_closing()

    def drop(self) -> None:
        """Close the connection at once: a client that does not read would hold it for ever, and what it has is cut."""
        if self._request.transport is not None:
            self._request.transport.abort()

    @property
    def is_full(self) -> bool:
        """Whether the client is slow: more than a buffer's worth waits for it, and `write` should not be called."""
        return self._connection.writing_paused

    def call_when_free(self, call: Callable[[], None]) -> None:
        """Call `call` once when the client has read enough to take more. A client that leaves never does."""
        self._connection.when_free.append(call)

    async def begin_stream(self, decision_header: str, first: bytes) -> None:
        """Send the head of a stream of events and its first piece, in one write."""
        headers = {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would otherwise hold tokens back
            DECISION_HEADER: decision_header,
        }
        self.response = web.StreamResponse(headers=headers)
        if self._is_chunked:
            self.response.enable_chunked_encoding()
        async with self._sending():
            await self.response.prepare(self._request)
            await self.response.write(first)  # aiohttp keeps the head back until there is something to write
        self._transport = self._request.transport

    def write(self, data: bytes) -> None:
        """Send one piece of the stream, at once and whatever is still waiting: see `is_full`."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ClientGoneError("The client closed its connection.")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def end_stream(self, last: bytes = b"") -> web.StreamResponse:
        """Send the end, and wait until the client has taken most of it."""
        assert self.response is not None
        async with self._sending():
            await self.response.write_eof(last)
        return self.response

    async def send_whole(self, status: int, content_type: str, body: bytes, decision_header: str) -> web.StreamResponse:
        """Send a whole answer now, so that what follows on our side does not delay it."""
        headers = {"Content-Type": content_type, DECISION_HEADER: decision_header}
        response = web.Response(status=status, body=body, headers=headers)
        self.response = response
        async with self._sending():
            await response.prepare(self._request)
            await response.write_eof()
        return response

    @asynccontextmanager
    async def _sending(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._patience_s):
                yield
        except ConnectionError as error:
            raise ClientGoneError("The client closed its connection.") from error
        except TimeoutError as error:
            raise ClientGoneError(f"The client took nothing for {self._patience_s:g} s.") from error
