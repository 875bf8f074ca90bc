"""Clients that are slow, rude or no HTTP clients at all: each ends by itself, and hurts nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from urllib.parse import urlsplit

import msgspec
import pytest
from aiohttp import web

from tests.support.router_rig import PATIENCE_S, QUICK, Rig, happens, rig
from tests.support.stub_worker import Behaviour
from tollbridge.wire.connections import Connections

WHOLE = {"prompt": "Hello", "max_tokens": 8}
FAST = msgspec.structs.replace(
    QUICK, head_timeout_s=0.3, body_timeout_s=2.0, body_idle_s=0.3, max_connections=20, linger_s=0.2
)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"


async def dial(r: Rig, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(r.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(data)
    return reader, writer


async def told(r: Rig, data: bytes) -> tuple[int, dict[str, object]]:
    """Send `data`, keep the connection open, and return status and body of what comes until the router closes it."""
    reader, writer = await dial(r, data)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", HEAD[:-4], HEAD[:-2]])
async def test_a_head_has_a_deadline(data: bytes) -> None:
    async with rig(limits=FAST) as r:
        status, body = await told(r, data)
        assert (status, "0.3 s" in str(body)) == (408, True)


async def test_a_head_that_comes_drop_by_drop_has_the_same_deadline() -> None:
    async with rig(limits=FAST) as r:
        reader, writer = await dial(r, b"GET /")
        async with asyncio.timeout(PATIENCE_S):
            answer = asyncio.create_task(reader.read())
            while not answer.done():
                writer.write(b"X")
                await asyncio.wait({answer}, timeout=0.05)
        assert answer.exception() is not None or answer.result().startswith(b"HTTP/1.1 408")  # or reset
        writer.close()


async def test_the_second_request_of_a_connection_too() -> None:
    async with rig(limits=FAST) as r:
        reader, writer = await dial(r, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(size)
            writer.write(b"GET /hea")
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
        writer.close()


@pytest.mark.parametrize("turns", range(5))
async def test_the_rest_of_a_body_is_no_head(turns: int) -> None:
    """Whichever turn of the loop it comes in: taken for the beginning of a head, it would end the answer after 10 s."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def handle(request: web.BaseRequest) -> web.Response:
        entered.set()
        await leave.wait()
        return web.Response(body=await request.read())

    connections = Connections(web.Server(handle), who="router", max_connections=1, head_timeout_s=60.0)
    here, there = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=there)
    _, connection = await asyncio.get_running_loop().connect_accepted_socket(connections, here)
    connection.data_received(HEAD + b"x" * 60)
    for _ in range(turns):
        await asyncio.sleep(0)
    connection.data_received(b"x" * 40)
    async with asyncio.timeout(PATIENCE_S):
        await entered.wait()
        assert connection._head_timer is None
        leave.set()
        assert (await reader.readuntil(b"x" * 100)).startswith(b"HTTP/1.1 200")
    connection.force_close()
    writer.close()


async def test_an_idle_connection_may_stay() -> None:
    """Between two requests nothing is owed."""
    async with rig(limits=FAST) as r:
        for _ in range(3):
            assert (await r.post(WHOLE)).status == 200
            await asyncio.sleep(0.4)  # longer than a head may take


@pytest.mark.parametrize("data", [HEAD, HEAD + b'{"prompt":'])
async def test_a_body_that_does_not_come_holds_no_place(data: bytes) -> None:
    async with rig(limits=FAST, max_concurrent=1, max_queue=0) as r:
        slow = [asyncio.create_task(told(r, data)) for _ in range(8)]
        assert (await r.post(WHOLE)).status == 200
        assert all(status == 408 for status, _ in await asyncio.gather(*slow))


async def test_malformed_http_is_told_in_json_and_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with rig(limits=FAST) as r:
        for data in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),  # TLS to a plain port
            b"GET / HTTP/9.9\r\n\r\n",
            b"NONSENSE\r\n\r\n",
            b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        ):
            status, body = await told(r, data)
            assert status in (400, 408), data[:40]
            assert set(body["error"]) == {"message", "type", "param", "code"}  # type: ignore[arg-type]
            assert (await r.post(WHOLE)).status == 200
    assert "Traceback" not in caplog.text


async def test_connections_are_bounded() -> None:
    async with rig(limits=msgspec.structs.replace(FAST, head_timeout_s=PATIENCE_S)) as r:
        assert (await r.post(WHOLE)).status == 200  # keeps its connection
        mute = [await dial(r, b"") for _ in range(19)]
        more = [await dial(r, b"") for _ in range(4)]
        answers = [await asyncio.wait_for(reader.read(), PATIENCE_S) for reader, _ in more]
        assert all(answer.startswith(b"HTTP/1.1 503") and b"Retry-After" in answer for answer in answers)
        assert (await r.post(WHOLE)).status == 200
        for _, writer in mute + more:
            writer.close()


async def test_bodies_are_bounded_together() -> None:
    async with rig(limits=msgspec.structs.replace(FAST, max_bodies_bytes=50_000)) as r:
        assert (await r.post({"prompt": "a" * 60_000})).status == 429
        assert (await r.post(WHOLE)).status == 200


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def post(body: dict[str, object], num_bytes: int | None = None) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {num_bytes or len(raw)}\r\n\r\n"
    return head.encode() + raw


async def test_one_request_ahead_is_served_in_turn() -> None:
    async with rig(limits=FAST) as r:
        reader, writer = await dial(r, post(WHOLE | {"stream": True}) + get("/v1/models"))
        async with asyncio.timeout(PATIENCE_S):
            stream = await reader.readuntil(b"\r\n0\r\n\r\n")
            models = await reader.readuntil(b"]}")
        assert stream.count(b"HTTP/1.1 200 OK") == 1
        assert b"[DONE]" in stream
        assert models.startswith(b"HTTP/1.1 200 OK")
        writer.close()


@pytest.mark.parametrize(
    "ahead",
    [get("/health") * 2, get("/health") * 5000, post(WHOLE, num_bytes=1 << 30) + b" " * (1 << 20)],
    ids=["two", "many", "a body"],
)
async def test_more_ahead_costs_the_connection_and_frees_the_worker(ahead: bytes) -> None:
    """Left unread, the connection could not tell that its client is gone."""
    async with rig(limits=FAST) as r:
        r["d0"].behaviour["local"] = Behaviour("stall", after=1)
        r["p0"].behaviour["local"] = Behaviour("stall", after=1)
        reader, writer = await dial(r, post(WHOLE | {"stream": True}))
        async with asyncio.timeout(PATIENCE_S):
            await reader.readuntil(b"Hel")
            writer.write(ahead)
            with contextlib.suppress(ConnectionError):
                await reader.read()
        served = r["d0"] if r["d0"].seen else r["p0"]
        await happens(served.departed["local"])
        writer.close()
