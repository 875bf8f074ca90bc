"""A client that leaves, in every phase: both workers learn it within a bounded time."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from tests.support.router_rig import PATIENCE_S, Rig, happens, rig
from tests.support.stub_worker import Behaviour, StubWorker
from tests.support.timing import once_below

STREAM = {"prompt": "Hello", "max_tokens": 8, "stream": True}


@asynccontextmanager
async def socket_to(r: Rig) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = urlsplit(r.url).netloc.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


def request(body: dict[str, object], policy: str, request_id: str) -> bytes:
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-tollbridge-policy: {policy}\r\nx-request-id: {request_id}\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


async def ended(r: Rig, request_id: str) -> str:
    status = await r.until(f"/decisions/{request_id}", lambda record: record["happened"].get("status") is not None)
    return str(status["happened"]["status"])


@pytest.mark.parametrize("stream", [True, False])
async def test_before_the_head_of_either_leg(stream: bool) -> None:
    async with rig() as r:
        r["p0"].behaviour["prefill"] = r["d0"].behaviour["decode"] = Behaviour("hang")
        async with socket_to(r) as (_, writer):
            writer.write(request(STREAM | {"stream": stream}, "split", "early"))
            await happens(r["p0"].arrived["prefill"])
            await happens(r["d0"].arrived["decode"])
        await happens(r["p0"].departed["prefill"])
        await happens(r["d0"].departed["decode"])
        assert await ended(r, "early") == "cancelled"
        assert await r.metric("in_flight_requests") == 0
        assert await r.metric("requests_total", outcome="cancelled") == 1
        assert await r.metric("retries_total") == 0


async def test_after_decodes_head_before_its_first_token() -> None:
    async with rig() as r:
        r["p0"].behaviour["prefill"] = Behaviour("hang")
        r["d0"].behaviour["decode"] = Behaviour("head")
        async with socket_to(r) as (_, writer):
            writer.write(request(STREAM, "split", "head"))
            await happens(r["d0"].arrived["decode"])
            await r.until("/decisions/head", lambda _: True)
        await happens(r["p0"].departed["prefill"])
        await happens(r["d0"].departed["decode"])


async def test_mid_stream_with_prefill_still_running() -> None:
    async with rig() as r:
        r["p0"].behaviour["prefill"] = Behaviour("hang")
        r["d0"].behaviour["decode"] = Behaviour("stall", after=2)
        async with socket_to(r) as (reader, writer):
            writer.write(request(STREAM, "split", "mid"))
            async with asyncio.timeout(PATIENCE_S):
                await reader.readuntil(b"lo")
        await happens(r["p0"].departed["prefill"])
        await happens(r["d0"].departed["decode"])
        assert await ended(r, "mid") == "cancelled"


async def test_mid_stream_local() -> None:
    async with rig() as r:
        r["d0"].behaviour["local"] = Behaviour("stall", after=2)
        async with r.open(STREAM) as response:
            await response.content.readuntil(b"lo")
        await happens(r["d0"].departed["local"])


async def test_while_the_body_is_still_being_sent() -> None:
    async with rig() as r:
        async with socket_to(r) as (_, writer):
            writer.write(request(STREAM, "split", "half")[:-5])
            await writer.drain()
            await r.until("/fleet", lambda fleet: fleet["receiving_bytes"] > 0)
        await r.until("/fleet", lambda fleet: fleet["receiving_bytes"] == 0)
        assert r["p0"].seen == r["d0"].seen == []


async def test_a_client_that_stops_reading_is_given_up() -> None:
    """Backpressure reaches the worker; the client's own deadline ends it."""
    async with rig(idle_timeout_s=1.0) as r:
        r["d0"].tokens = ["x" * 65536] * 400
        async with socket_to(r) as (reader, writer):
            writer.write(request(STREAM, "local", "stuck"))
            await happens(r["d0"].departed["local"])
            assert await ended(r, "stuck") == "cancelled"
            assert "took nothing" in (await r.record("stuck"))["happened"]["error"]
            async with asyncio.timeout(
                PATIENCE_S
            ):  # its connection is closed, and it can tell that this is not the end
                assert not (await reader.read()).endswith(b"0\r\n\r\n")


LONG = ["x" * 65536] * 400  # more than all buffers hold


@pytest.mark.parametrize("state", ["no head", "head", "stream", "slow reader", "one request ahead"])
async def test_the_worker_learns_it_within_100_ms(state: str) -> None:
    behaviour = {"no head": Behaviour("hang"), "head": Behaviour("head")}.get(state, Behaviour("stall", after=2))
    async with rig(StubWorker("d0")) as r:
        d0 = r["d0"]
        d0.behaviour["local"] = Behaviour() if state == "slow reader" else behaviour
        d0.tokens = LONG if state == "slow reader" else d0.tokens
        attempts = itertools.count()
        await once_below(0.1, lambda: _hang_up(r, state, next(attempts)))


async def _hang_up(r: Rig, state: str, attempt: int) -> float:
    """Return the seconds from a client's end to the worker's noticing it."""
    d0 = r["d0"]
    d0.arrived["local"].clear()
    d0.departed["local"].clear()
    async with socket_to(r) as (reader, writer):
        writer.write(request(STREAM, "local", f"r{attempt}"))
        await happens(d0.arrived["local"])
        async with asyncio.timeout(PATIENCE_S):
            if state in ("stream", "one request ahead"):
                await reader.readuntil(b"lo")
            if state == "one request ahead":
                writer.write(request(STREAM, "local", f"ahead{attempt}"))
            if state == "slow reader":
                await _stuck(d0)
        writer.transport.abort()
        start_s = asyncio.get_running_loop().time()
        await happens(d0.departed["local"])
    return asyncio.get_running_loop().time() - start_s


async def _stuck(worker: StubWorker) -> None:
    """Wait until the worker cannot write any more: its client's slowness has come through to it."""
    before = -1
    while before != worker.num_written:
        before = worker.num_written
        await asyncio.sleep(0.1)


async def test_a_slow_reader_costs_buffers_and_gets_every_byte() -> None:
    """The router keeps what two buffers hold, however much the worker has to say."""
    async with rig(StubWorker("d0")) as r:
        d0 = r["d0"]
        d0.tokens = LONG
        async with socket_to(r) as (reader, writer):
            writer.write(request(STREAM, "local", "slow"))
            await happens(d0.arrived["local"])
            async with asyncio.timeout(PATIENCE_S):
                await _stuck(d0)
                assert d0.num_written < len(LONG) - 50, "the worker was not stopped"
                answer = bytearray()
                while not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                    answer += await reader.read(1 << 16)
            assert answer.count(b"x") >= sum(map(len, LONG))
            assert answer.count(b"data: ") == len(LONG) + 1


async def test_ten_cancelled_splits_do_not_hold_up_the_next() -> None:
    async with rig() as r:
        r["p0"].behaviour["prefill"] = r["d0"].behaviour["decode"] = Behaviour("hang")
        for _ in range(10):
            for stub, role in (("p0", "prefill"), ("d0", "decode")):
                r[stub].arrived[role].clear()
                r[stub].departed[role].clear()
            async with socket_to(r) as (_, writer):
                writer.write(request(STREAM, "split", "again"))
                await happens(r["p0"].arrived["prefill"])
                await happens(r["d0"].arrived["decode"])
            await happens(r["p0"].departed["prefill"])
            await happens(r["d0"].departed["decode"])
        r["p0"].behaviour.clear()
        r["d0"].behaviour.clear()
        assert (await r.post(STREAM, policy="split")).text == "Hello world"
