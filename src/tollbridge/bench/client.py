"""The measuring client: one asyncio protocol per connection, no task per request, time taken as bytes arrive.

A request counts as sent when it is handed over here, so that connecting is part of its TTFT, as its user sees it.
Connections are kept alive and used again; one that has been idle for `KEEP_S` is not, since the server may be about to
close it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from tollbridge.bench.answer import Answer
from tollbridge.errors import ConfigError

KEEP_S = 3.0
_SWEEP_S = 0.2
_MAX_HEAD_BYTES = 64 << 10
now = time.monotonic  # one clock for all processes of this machine


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    tls: bool
    path: str
    headers: tuple[tuple[str, str], ...] = field(default=())

    @classmethod
    def at(cls, url: str, path: str, headers: dict[str, str]) -> Target:
        """Return the target of a base URL; ConfigError when it is none."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not the URL of a server: write http://HOST:PORT.")
        tls = parts.scheme == "https"
        try:
            port = parts.port or (443 if tls else 80)
        except ValueError:
            raise ConfigError(f"{url!r} has a port that is none.") from None
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host=parts.hostname, port=port, tls=tls, path=base + path, headers=tuple(headers.items()))

    def request(self, body: bytes) -> bytes:
        """Return the bytes of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body


class Client:
    """A pool of connections to any targets. Use it inside `async with`."""

    def __init__(self, *, stall_s: float = 60.0, connect_s: float = 10.0) -> None:
        self._stall_s, self._connect_s = stall_s, connect_s
        self._idle: dict[Target, deque[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._dialling: set[asyncio.Task[None]] = set()
        self._tls: ssl.SSLContext | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Client:
        self._sweep()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in list(self._dialling):
            task.cancel()
        await asyncio.gather(*self._dialling, return_exceptions=True)
        for connection in list(self._open):
            connection.drop()
        await asyncio.sleep(0)  # the transports' own last callbacks

    def send(self, target: Target, raw: bytes) -> Answer:
        """Send one request now; the answer says by itself when it is done."""
        answer = Answer(now())
        idle = self._idle.setdefault(target, deque())
        while idle:
            connection = idle.pop()
            if connection.is_fresh():
                connection.begin(raw, answer)
                return answer
            connection.drop()
        task = asyncio.get_running_loop().create_task(self._dial(target, raw, answer))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)
        return answer

    def cut_off(self, answer: Answer) -> None:
        """End `answer` and close its connection, which is how a server learns that nobody wants the rest."""
        answer.cut_off()
        for connection in list(self._open):
            if connection.answer is answer:
                connection.drop()

    async def _dial(self, target: Target, raw: bytes, answer: Answer) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, target), target.host, target.port, ssl=self._context(target)
                )
        except TimeoutError:
            answer.fail("connection", f"{target.host}:{target.port} did not accept within {self._connect_s:g} s")
        except OSError as error:
            answer.fail("connection", f"{target.host}:{target.port}: {error.strerror or error}")
        else:
            if answer.done:  # cut off meanwhile
                connection.drop()
            else:
                connection.begin(raw, answer)

    def _context(self, target: Target) -> ssl.SSLContext | None:
        if target.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls if target.tls else None

    # ── called by connections ──

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def closed(self, connection: _Connection) -> None:
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.setdefault(connection.target, deque()).remove(connection)

    def free(self, connection: _Connection) -> None:
        self._idle.setdefault(connection.target, deque()).append(connection)

    def _sweep(self) -> None:
        """Give up answers of which nothing has come for too long. One timer for all: they are many."""
        limit_s = now() - self._stall_s
        for connection in list(self._open):
            if connection.answer is not None and connection.heard_s < limit_s:
                connection.answer.fail("stalled", f"nothing came for {self._stall_s:g} s")
                connection.drop()
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, client: Client, target: Target) -> None:
        self.target = target
        self.answer: Answer | None = None
        self.heard_s = now()
        self._client = client
        self._now_s = 0.0
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._parser = httptools.HttpResponseParser(self)

    def is_fresh(self) -> bool:
        return not self._transport.is_closing() and now() - self.heard_s < KEEP_S

    def begin(self, raw: bytes, answer: Answer) -> None:
        self.answer = answer
        self.heard_s = now()
        self._transport.write(raw)

    def drop(self) -> None:
        """Close at once. The answer, if any, has been told by whoever calls."""
        self.answer = None
        self._transport.abort()

    # ── asyncio ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        self._now_s = self.heard_s = now()
        if self.answer is None:
            self._transport.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._spoilt(f"no HTTP: {error}: {data[:60]!r}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.closed(self)
        answer, self.answer = self.answer, None
        if answer is None:
            return
        if exc is not None:
            answer.fail("connection", str(exc) or type(exc).__name__)
        answer.end()

    def _spoilt(self, detail: str) -> None:
        answer = self.answer
        if answer is not None:
            answer.fail("garbage", detail)
        self.drop()

    # ── httptools ──

    def on_message_begin(self) -> None:
        self._headers, self._head_bytes = {}, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes <= _MAX_HEAD_BYTES:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.answer is not None:
            self.answer.head(self._parser.get_status_code(), self._headers)

    def on_body(self, body: bytes) -> None:
        answer = self.answer
        if answer is not None:
            answer.body(body, self._now_s)
            if answer.failure:
                self.drop()

    def on_message_complete(self) -> None:
        answer, self.answer = self.answer, None
        if answer is None:
            return
        if self._parser.should_keep_alive() and not answer.failure:
            self._client.free(self)
        else:
            self._transport.abort()
        answer.end()
