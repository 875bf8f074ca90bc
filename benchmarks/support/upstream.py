"""A loopback server whose timing is known: it streams tokens when its own clock says, or misbehaves as it is told.

python -m benchmarks.support.upstream TTFT_S GAP_S      # prints its URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Upstream:
    """Attributes may be changed between requests."""

    def __init__(self) -> None:
        self.ttft_s, self.gap_s = 0.0, 0.0
        self.misbehave = ""  # http | error | garbage | no_json | stall | cut | empty | whole | two_per_chunk
        self.running_usage = True
        self.num_connections = 0
        self.prompts: list[list[int]] = []
        self.counters: dict[str, float] = {"vllm:generation_tokens_total": 0.0, "vllm:prompt_tokens_total": 0.0}
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Upstream]:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await _body(reader, head.lower())
                if head.startswith(b"GET /metrics"):
                    writer.write(_whole("".join(f"{k} {v}\n" for k, v in self.counters.items()).encode()))
                elif not head.startswith(b"POST"):
                    writer.write(_whole(b'{"data": [{"id": "timed", "max_model_len": 4096}]}'))
                elif not await self._answer(json.loads(body), writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, body: dict[str, object], writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays open."""
        max_tokens = body.get("max_tokens", body.get("max_completion_tokens", 16))
        assert isinstance(max_tokens, int)
        self.prompts.append(list(body["prompt"]))  # type: ignore[call-overload]
        self.counters["vllm:prompt_tokens_total"] += len(self.prompts[-1])
        self.counters["vllm:generation_tokens_total"] += max_tokens
        start_s = asyncio.get_running_loop().time()
        if self.misbehave == "http":
            writer.write(_whole(b'{"error": {"message": "out of KV"}}', b"503 Service Unavailable"))
            return True
        if self.misbehave == "whole":
            writer.write(_whole(b'{"choices": [{"text": "all at once"}]}'))
            return True
        if self.misbehave == "garbage":
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
            await writer.drain()
            return False
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        step = 2 if self.misbehave == "two_per_chunk" else 1
        for count in range(step, max_tokens + 1, step):
            await _until(start_s + self.ttft_s + (count - step) * self.gap_s)
            if writer.transport.is_closing():
                return False  # the client has left
            if count > step:
                if self.misbehave == "stall":
                    await writer.drain()
                    await asyncio.sleep(3600)
                if self.misbehave == "cut":
                    return False
                if self.misbehave == "error":
                    writer.write(_chunk(b'data: {"error": {"message": "worker lost"}}\n\n'))
                    break
                if self.misbehave == "no_json":
                    writer.write(_chunk(b"data: {nonsense\n\n"))
                    break
            if self.misbehave != "empty":
                writer.write(_chunk(self._event(count, count == max_tokens, len(self.prompts[-1]))))
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return True

    def _event(self, count: int, is_last: bool, num_prompt: int) -> bytes:
        event: dict[str, object] = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": "timed",
            "choices": [{"index": 0, "text": " toll", "finish_reason": "length" if is_last else None}],
        }
        if self.running_usage or is_last:
            details = {"cached_tokens": 3}
            event["usage"] = {
                "completion_tokens": count, "prompt_tokens": num_prompt, "prompt_tokens_details": details,
            }  # fmt: skip
        return b"data: " + json.dumps(event).encode() + b"\n\n"


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """Return a request's body, of known length or in chunks."""
    fields = dict(line.split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if b"chunked" not in fields.get(b"transfer-encoding", b""):
        return await reader.readexactly(int(fields.get(b"content-length", b"0")))
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return body


async def _until(when_s: float) -> None:
    await asyncio.sleep(max(0.0, when_s - asyncio.get_running_loop().time()))


def _whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    return head + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _serve(ttft_s: float, gap_s: float) -> None:
    async with Upstream().serving() as upstream:
        upstream.ttft_s, upstream.gap_s = ttft_s, gap_s
        print(upstream.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1]), float(sys.argv[2])))
