"""Both ends of many streams in one process: a worker that sends an event when it is told to, and clients that read it.

In lockstep: a stream's next event leaves when its client has the last one. So each event travels alone, none is ever
merged with the next, and what stands between the ends is as busy as its own speed allows.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

MODEL = "trivial"
_ID = re.compile(rb"x-request-id: ([^\r]+)\r\n", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _event(first: bool) -> bytes:
    """One token as a worker writes it for a router, which asks for token ids, framed as a chunk."""
    choice: dict[str, object] = {"index": 0, "text": " toll", "logprobs": None, "finish_reason": None, "token_ids": [7]}
    choice |= {"prompt_token_ids": [1, 2, 3]} if first else {}
    chunk = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    data = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


_FIRST, _NEXT = _event(True), _event(False)
CHUNK_BYTES = len(_NEXT)


class Spring(asyncio.Protocol):
    """The worker's end of one connection. `streams` knows it by the request's id while a stream is open."""

    def __init__(self, streams: dict[bytes, Spring]) -> None:
        self._streams = streams
        self._buffer = b""
        self._id = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, _, body = self._buffer.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length:")
        if len(body) < (int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0) or not head:
            return
        self._buffer = b""
        named = _ID.search(head)
        if b"completions" not in head.split(b"\r\n", 1)[0] or named is None:
            self._answer(head.split(b" ", 2)[1])
            return
        self._id = named.group(1)
        self._streams[self._id] = self
        self._transport.write(_HEAD + _FIRST)

    def emit(self) -> None:
        self._transport.write(_NEXT)

    def end(self) -> None:
        self._streams.pop(self._id, None)
        self._transport.write(_END)

    def _answer(self, path: bytes) -> None:
        models = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 1 << 20}]}
        status = {"incarnation": "canned"}  # what makes it an embedded worker to a router
        body = json.dumps({b"/v1/models": models, b"/tollbridge/status": status}.get(path, {})).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)


class Basin(asyncio.Protocol):
    """The client's end of one stream. Calls `took` with itself whenever whole chunks have come."""

    def __init__(self, request: bytes, took: Callable[[Basin], None]) -> None:
        self._request, self._took = request, took
        self._buffer = b""
        self.num_chunks = self.num_events = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the stream broke off"))

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data
        if data.endswith(b"\r\n0\r\n\r\n") or data == b"0\r\n\r\n":
            self.done.set_result(None)
            self._transport.close()
            return
        self._buffer = b"" if data.endswith(b"\n\n\r\n") else data
        if self._buffer:
            return
        if not self.num_chunks:
            data = data.partition(b"\r\n\r\n")[2]  # the head
        self.num_chunks += data.count(b"\r\n") // 2  # no event has a carriage return
        self.num_events += data.count(b"data: ")
        self._took(self)


class Ends:
    """The worker at `url`, and streams that run to it through `via` (or straight) for as long as they are asked to."""

    def __init__(self) -> None:
        self._streams: dict[bytes, Spring] = {}
        self.url = ""

    async def listen(self) -> asyncio.Server:
        server = await asyncio.get_running_loop().create_server(
            lambda: Spring(self._streams), "127.0.0.1", 0, backlog=2048
        )
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def lockstep(self, via: str, num_streams: int, seconds: float) -> tuple[int, int]:
        """Run streams for `seconds`, each with one event under way; return the chunks and events that came."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds

        def took(basin: Basin, spring: bytes) -> None:
            stream = self._streams.get(spring)
            if stream is not None:  # else it was the last
                stream.emit() if loop.time() < until_s else stream.end()

        basins = [await self._open(via, took) for _ in range(num_streams)]
        await asyncio.gather(*(basin.done for basin in basins))
        return sum(basin.num_chunks for basin in basins), sum(basin.num_events for basin in basins)

    async def latencies_s(self, via: str, num_events: int, pause_s: float) -> list[float]:
        """Return how long each event of one stream took from the worker to the client, `pause_s` between two."""
        arrived, times_s = asyncio.Event(), []
        opened = await self._open(via, lambda *_: arrived.set())
        await arrived.wait()
        (spring,) = self._streams.values()
        for _ in range(num_events):
            await asyncio.sleep(pause_s)
            arrived.clear()
            start_s = time.perf_counter()
            spring.emit()
            await arrived.wait()
            times_s.append(time.perf_counter() - start_s)
        spring.end()
        await opened.done
        return times_s

    async def _open(self, via: str, took: Callable[[Basin, bytes], None]) -> Basin:
        parts, name = urlsplit(via), secrets.token_hex(8).encode()
        body = b'{"model": "trivial", "prompt": [1, 2, 3], "max_tokens": 1000000, "temperature": 0, "stream": true}'
        request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-request-id: %b\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (name, len(body), body)
        )
        _, basin = await asyncio.get_running_loop().create_connection(
            lambda: Basin(request, lambda made: took(made, name)), parts.hostname or "", parts.port or 80
        )
        return basin
