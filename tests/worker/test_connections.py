"""Clients that are slow, rude or no HTTP clients at all: each ends by itself, and hurts nobody else."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.worker.support import Client, fake_serving

PATIENCE_S = 60.0
FAST = {"head_timeout_s": 0.3, "body_timeout_s": 2.0, "body_idle_s": 0.3, "linger_s": 0.2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n"


async def told(client: Client, data: bytes) -> tuple[int, dict[str, object]]:
    """Send `data`, keep the connection open, and return status and body of what comes until the worker closes it."""
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", HEAD[:-2]])
async def test_a_head_has_a_deadline(data: bytes) -> None:
    async with fake_serving(**FAST) as client:
        assert (await told(client, data))[0] == 408
        await client.complete()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_body_that_does_not_come_holds_no_place(path: str) -> None:
    async with fake_serving(max_open=1, **FAST) as client:
        head = HEAD.replace(b"/v1/completions", path.encode())
        slow = [asyncio.create_task(told(client, head + part)) for part in (b"", b"{", b'{"prompt":', b" ")]
        await client.complete()
        assert all(status == 408 for status, _ in await asyncio.gather(*slow))


async def test_malformed_http_is_told_in_json_and_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_serving(**FAST) as client:
        for data in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),  # TLS to a plain port
            b"NONSENSE\r\n\r\n",
            b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        ):
            status, body = await told(client, data)
            assert status in (400, 408), data[:40]
            assert set(body["error"]) == {"message", "type", "param", "code"}  # type: ignore[arg-type]
            await client.complete()
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


async def test_bodies_are_bounded_together() -> None:
    async with fake_serving(max_bodies_bytes=50_000) as client:
        status, answer = await client.post("/v1/completions", {"prompt": "a" * 60_000})
        assert (status, answer["error"]["code"]) == (429, 429)
        await client.complete()
