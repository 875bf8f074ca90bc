"""The connections themselves: how many, how long a head may take, and what a client reads that speaks no HTTP.

aiohttp gives the head of a request unlimited time, keeps as many connections as there are descriptors, and answers
malformed HTTP with a text page and a traceback in the log. This subclass of its connection handler closes these gaps.

Pipelining (RFC 9112, section 9.3.2): one request may wait behind the one that is answered, and is served in turn. More,
or a body that would have to wait with it, costs the connection: a connection that is not read cannot tell that its
client has left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from tollbridge.wire.openai import ErrorBody, ErrorInfo

log = logging.getLogger("tollbridge.http")

MAX_AHEAD = 1  # requests that wait behind the one that is answered

_HEAD = (
    "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {size}\r\nConnection: close\r\n{more}\r\n"
)


class Connections:
    """Makes the handlers of one server and counts them. Called for every connection."""

    def __init__(
        self, server: web.Server, *, who: str, max_connections: int, head_timeout_s: float, **settings: Any
    ) -> None:
        """`who` names the server in sentences ("router"); `settings` are those of aiohttp's handler."""
        self._server = server
        self._settings = settings
        self.who = who
        self.max_connections = max_connections
        self.head_timeout_s = head_timeout_s
        self.num_open = 0

    def __call__(self) -> Connection:
        return Connection(self, self._server, loop=asyncio.get_running_loop(), **self._settings)


class Connection(web.RequestHandler):
    """One connection of a client."""

    def __init__(self, connections: Connections, server: web.Server, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._connections = connections
        self._head_timer: asyncio.TimerHandle | None = None
        self.when_free: list[Callable[[], None]] = []  # to be called once when the client takes more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.num_open += 1
        super().connection_made(transport)
        if self._connections.num_open > self._connections.max_connections:
            sentence = f"The {self._connections.who} has too many connections: try again later."
            self._refuse("503 Service Unavailable", sentence, "Retry-After: 1\r\n")
        else:
            self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.num_open -= 1
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        seen = self._request_count
        super().data_received(data)
        if self._request_count != seen:
            self._disarm()  # a whole head; what follows has its own deadlines
        elif self._head_timer is None and self._is_between_requests:
            self._await_head()
        num_ahead = len(self._messages) - (self._current_request is None)
        if num_ahead > MAX_AHEAD:
            self._drop("requests ahead of their answers")

    def pause_reading(self) -> None:
        super().pause_reading()
        if self._messages and self._current_request is not None:
            self._drop("the body of a request ahead of its answer")

    def resume_writing(self) -> None:
        super().resume_writing()
        calls, self.when_free = self.when_free, []
        for call in calls:
            call()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what never became a request; what is not the client's fault is aiohttp's to log."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        log.debug("malformed HTTP: %s", type(exc).__name__)
        response = web.Response(
            status=status, body=_error(status, "This is no valid HTTP request."), content_type="application/json"
        )
        response.force_close()
        return response

    @property
    def _is_between_requests(self) -> bool:
        """Whether nothing is answered and the next head is waited for.

        That there is no current request says less: before Python 3.12 a request becomes that one turn of the loop after
        it was taken, and the rest of its body may come in between.
        """
        return self._waiter is not None and not self._waiter.done()

    def _drop(self, why: str) -> None:
        log.debug("connection dropped: %s", why)
        if self.transport is not None:
            self.transport.abort()

    def _await_head(self) -> None:
        limit_s = self._connections.head_timeout_s
        self._head_timer = asyncio.get_running_loop().call_later(limit_s, self._late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        limit_s = self._connections.head_timeout_s
        self._refuse("408 Request Timeout", f"The head of the request did not arrive within {limit_s:g} s.")

    def _refuse(self, status: str, message: str, more: str = "") -> None:
        body = _error(int(status[:3]), message)
        if self.transport is not None:
            self.transport.write(_HEAD.format(status=status, size=len(body), more=more).encode() + body)
        self.force_close()


def _error(status: int, message: str) -> bytes:
    kind = "invalid_request_error" if status < 500 else "unavailable"
    return msgspec.json.encode(ErrorBody(error=ErrorInfo(message=message, type=kind, code=status)))
