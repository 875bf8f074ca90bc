"""A worker that costs next to nothing: canned answers from a bare protocol, for measuring what stands in front of it.

    python -m benchmarks.support.trivial [NUM_EVENTS]      # prints its port

It speaks as much HTTP as keep-alive clients need, and as much of the worker's API as routers ask for.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

MODEL = "trivial"


def _answer(body: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _json(value: object) -> bytes:
    return _answer(json.dumps(value).encode())


def _chunked(events: list[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


def _events(num_events: int, *, ids: bool) -> list[bytes]:
    """Return the stream, one event per chunk, as a worker sends them."""
    events = []
    for at in range(num_events):
        choice: dict[str, object] = {"index": 0, "text": " toll", "logprobs": None, "finish_reason": None}
        choice["finish_reason"] = "length" if at == num_events - 1 else None
        if ids:
            choice |= {"token_ids": [7]} | ({"prompt_token_ids": [1, 2, 3]} if at == 0 else {})
        chunk = {"id": "c", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
        events.append(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")
    return [*events, b"data: [DONE]\n\n"]


class Trivial(asyncio.Protocol):
    """One connection."""

    def __init__(self, num_events: int) -> None:
        self._buffer = b""
        usage = {"prompt_tokens": 3, "completion_tokens": num_events, "total_tokens": 3 + num_events}
        choice = {"index": 0, "text": " toll" * num_events, "logprobs": None, "finish_reason": "length"}
        whole = {"id": "c", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
        self._whole = _json(whole | {"usage": usage})
        self._stream = _chunked(_events(num_events, ids=False))
        self._stream_with_ids = _chunked(_events(num_events, ids=True))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            at = head.lower().find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + size:
                return
            body = self._buffer[end + 4 : end + 4 + size]
            self._buffer = self._buffer[end + 4 + size :]
            self._transport.write(self._reply(head.split(b" ", 2)[1], body))

    def _reply(self, path: bytes, body: bytes) -> bytes:
        if path == b"/v1/models":
            return _json({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 4096}]})
        if path == b"/tollbridge/status":
            return _json({"incarnation": "canned"})  # what makes it an embedded worker to a router
        if b"completions" not in path:
            return _json({})
        if b'"stream":true' not in body and b'"stream": true' not in body:
            return self._whole
        return self._stream_with_ids if b"return_token_ids" in body else self._stream


async def _serve(num_events: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Trivial(num_events), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(int(sys.argv[1]) if len(sys.argv) > 1 else 16))
