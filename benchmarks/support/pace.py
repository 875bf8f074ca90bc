"""Requests at a fixed rate over keep-alive connections, whatever comes back: an open loop, as cheap as may be."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import numpy as np

_HEAD = b"HTTP/1.1 "


@dataclass
class Answers:
    """What came back. Times in seconds."""

    latencies_s: list[float] = field(default_factory=list)
    errors: int = 0
    sent: int = 0

    def percentile_s(self, q: float) -> float:
        return float(np.percentile(self.latencies_s, q)) if self.latencies_s else float("nan")


class _Line(asyncio.Protocol):
    """One connection, which may have several requests under way one behind the other."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._sent_s: deque[float] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    @property
    def is_free(self) -> bool:
        return not self._sent_s

    def send(self, request: bytes) -> None:
        self._sent_s.append(time.perf_counter())
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        for status in data.split(_HEAD)[1:]:
            self._answers.errors += not status.startswith(b"200")
            self._answers.latencies_s.append(time.perf_counter() - self._sent_s.popleft())


async def pace(
    url: str, body: bytes, *, per_s: float, seconds: float, connections: int = 64, path: str = "/v1/completions"
) -> Answers:
    """Send whole requests for `seconds` and return once most are answered; a rate that cannot be held sends less."""
    parts, answers = urlsplit(url), Answers()
    request = (
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    loop = asyncio.get_running_loop()
    lines = [
        (await loop.create_connection(lambda: _Line(answers), parts.hostname or "127.0.0.1", parts.port or 80))[1]
        for _ in range(connections)
    ]
    start_s = loop.time()
    while (now_s := loop.time() - start_s) < seconds:
        free = (line for line in lines if line.is_free)
        while answers.sent < now_s * per_s and (line := next(free, None)) is not None:
            line.send(request)
            answers.sent += 1
        await asyncio.sleep(0.002)
    deadline_s = loop.time() + 30.0
    while not all(line.is_free for line in lines) and loop.time() < deadline_s:  # noqa: ASYNC110 - once, at the end
        await asyncio.sleep(0.01)
    for line in lines:
        line.transport.close()
    return answers
