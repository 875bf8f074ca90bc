"""A closed loop of keep-alive connections, as cheap as it can be in Python: how fast does the other side answer?"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import numpy as np

_END_OF_CHUNKS = b"\r\n0\r\n\r\n"


@dataclass
class Blows:
    """What came back. Times in seconds."""

    latencies_s: list[float] = field(default_factory=list)
    errors: int = 0
    elapsed_s: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.latencies_s) / self.elapsed_s

    def percentile_s(self, q: float) -> float:
        return float(np.percentile(self.latencies_s, q))


class _Striker(asyncio.Protocol):
    """One connection: sends, waits for the end of the answer, sends again while `more` says so."""

    def __init__(self, request: bytes, blows: Blows, more: Callable[[], bool]) -> None:
        self._request, self._blows, self._more = request, blows, more
        self._buffer = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._strike()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._blows.errors += 1
            self.done.set_result(None)

    def _strike(self) -> None:
        if self.done.done():
            return
        if not self._more():
            self.done.set_result(None)
            self._transport.close()
            return
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._is_whole():
            return
        self._blows.latencies_s.append(time.perf_counter() - self._sent_s)
        if not self._buffer.startswith(b"HTTP/1.1 200"):
            self._blows.errors += 1
        self._buffer = b""
        self._strike()

    def _is_whole(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        if at < 0:
            return self._buffer.endswith(_END_OF_CHUNKS)
        return len(self._buffer) >= end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])


async def hammer(
    url: str,
    body: bytes,
    *,
    connections: int,
    requests: int,
    most_s: float = math.inf,
    path: str = "/v1/completions",
) -> Blows:
    """Send `requests` requests over `connections` connections and return when all have been answered.

    After `most_s` no more are sent.
    """
    parts, blows, left = urlsplit(url), Blows(), requests
    end_s = time.perf_counter() + most_s

    def more() -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and time.perf_counter() < end_s

    request = (
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    loop, start_s = asyncio.get_running_loop(), time.perf_counter()
    strikers = []
    for _ in range(connections):
        _, striker = await loop.create_connection(
            lambda: _Striker(request, blows, more), parts.hostname or "127.0.0.1", parts.port or 80
        )
        strikers.append(striker)
    await asyncio.gather(*(striker.done for striker in strikers))
    blows.elapsed_s = time.perf_counter() - start_s
    return blows
