"""The client's side of one request: the head, the pieces, the end. A client that has left raises ClientGoneError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from tollbridge.router.upstream import ClientGoneError

DECISION_HEADER = "x-tollbridge-decision"


class Client:
    """Sends one answer, streamed or whole."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None  # set once the head is on its way

    @property
    def gone(self) -> bool:
        transport = self._request.transport
        return transport is None or transport.is_closing()

    async def begin_stream(self, decision_header: str) -> None:
        """Send the head of a stream of events."""
        headers = {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would otherwise hold tokens back
            DECISION_HEADER: decision_header,
        }
        self.response = web.StreamResponse(headers=headers)
        with _departures():
            await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Send one piece of the stream; waits when the client is slow."""
        assert self.response is not None
        with _departures():
            await self.response.write(data)

    async def end_stream(self, last: bytes = b"") -> web.StreamResponse:
        assert self.response is not None
        with _departures():
            await self.response.write_eof(last)
        return self.response

    async def send_whole(self, status: int, content_type: str, body: bytes, decision_header: str) -> web.StreamResponse:
        """Send a whole answer now, so that what follows on our side does not delay it."""
        headers = {"Content-Type": content_type, DECISION_HEADER: decision_header}
        response = web.Response(status=status, body=body, headers=headers)
        self.response = response
        with _departures():
            await response.prepare(self._request)
            await response.write_eof()
        return response


@contextmanager
def _departures() -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise ClientGoneError("The client closed its connection.") from error
