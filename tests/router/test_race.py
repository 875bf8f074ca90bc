"""Races that sockets cannot be made to lose on demand: what happens in the very step in which something else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from tests.support.router_rig import PATIENCE_S
from tollbridge.config.cluster import ClusterConfig, RouterConfig, WorkerConfig
from tollbridge.errors import UpstreamError
from tollbridge.router.app import make_context
from tollbridge.router.client import Client
from tollbridge.router.context import Context
from tollbridge.router.decide import decide_call
from tollbridge.router.fanout import Fanout
from tollbridge.router.flow import Flow
from tollbridge.router.ingress import Call, parse_body
from tollbridge.router.outcome import Arrival
from tollbridge.router.upstream import ClientGoneError

EVENTS = b'data: {"choices":[{"text":"x"}]}\n\ndata: [DONE]\n\n'


class FakeUpstream:
    """Prefill fails when `prefill` is set; each decode leg says its piece when `decode` is."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.prefill: asyncio.Future[None] = loop.create_future()
        self.decode: asyncio.Future[bytes] = loop.create_future()
        self.legs: list[str] = []

    @asynccontextmanager
    async def request(self, worker: Any, method: str, path: str, **_: Any) -> AsyncIterator[Any]:
        self.legs.append(worker.name)
        if worker.name == "p0":
            await self.prefill
            raise UpstreamError("p0 is gone")
        said: list[bytes] = []

        async def readany() -> bytes:
            said.append(b"" if said else await self.decode)
            return said[-1]

        async def pour(take: Any) -> None:
            assert not await readany()

        yield SimpleNamespace(status=200, content_type="text/event-stream", readany=readany, pour=pour)


class FakeClient:
    """Notes what it is sent; each call takes a step of the loop, as a socket's does."""

    def __init__(self) -> None:
        self.response: web.StreamResponse | None = None
        self.gone = self.is_full = False
        self.sent: list[str | bytes] = []

    async def begin_stream(self, header: str, first: bytes) -> None:
        self.response = web.StreamResponse()
        self.sent += [header, first]
        await asyncio.sleep(0)

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    async def end_stream(self, last: bytes = b"") -> web.StreamResponse | None:
        self.sent.append(last)
        return self.response


def world(upstream: FakeUpstream, body: bytes) -> tuple[Context, Call, Arrival]:
    workers = [
        WorkerConfig(name="p0", prefer="prefill", url="http://p0:1", kv="p0:2"),
        WorkerConfig(name="d0", prefer="decode", url="http://d0:1"),
    ]
    context = make_context(ClusterConfig(router=RouterConfig(policy="split"), workers=workers), b"secret")
    context = replace(context, upstream=cast(Any, upstream))
    for worker in context.fleet:
        worker.ready, worker.kv = True, ("p0", 2)
    call = Call(
        id="r",
        path="/v1/completions",
        body=parse_body(body),
        body_bytes=1,
        model=None,
        stream=True,
        override=None,
        trace={},
    )
    return context, call, Arrival(at_s=context.clock.monotonic())


async def flow_of(upstream: FakeUpstream, client: FakeClient) -> Flow:
    context, call, arrival = world(upstream, b'{"prompt": [1], "stream": true}')
    return Flow(context, call, cast(Client, client), await decide_call(context, call), arrival)


async def test_the_retry_owns_the_client() -> None:
    """Prefill fails in the step in which decode speaks."""
    upstream, client = FakeUpstream(), FakeClient()
    flow = await flow_of(upstream, client)
    task = asyncio.create_task(flow.run())
    async with asyncio.timeout(PATIENCE_S):
        while len(upstream.legs) < 2:
            await asyncio.sleep(0)
        upstream.prefill.set_result(None)  # both wake in the same step of the loop, prefill first
        upstream.decode.set_result(EVENTS)
        await task
    assert upstream.legs == ["d0", "p0", "d0"]
    head, *rest = client.sent
    assert '"reason":"prefill_failed"' in str(head)
    assert rest == [EVENTS, b""]
    assert flow._continuing._told.text == "x", "the first attempt told it to nobody"


async def test_a_cancel_in_that_step_is_not_lost() -> None:
    """By the request's deadline, or since another prompt of its list has failed: the client is still there."""
    upstream, client = FakeUpstream(), FakeClient()
    task = asyncio.create_task((await flow_of(upstream, client)).run())
    async with asyncio.timeout(PATIENCE_S):
        while len(upstream.legs) < 2:
            await asyncio.sleep(0)
        upstream.prefill.set_result(None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert upstream.legs == ["d0", "p0"], "no further attempt"


class Leaver(FakeClient):
    """Has gone when the head is sent."""

    async def begin_stream(self, header: str, first: bytes) -> None:
        self.response = web.StreamResponse()
        raise ClientGoneError("The client closed its connection.")

    def drop(self) -> None:
        self.gone = True


async def test_a_client_that_leaves_just_as_the_stream_of_a_list_begins() -> None:
    upstream, client = FakeUpstream(), Leaver()
    upstream.decode.set_result(EVENTS)
    context, call, arrival = world(upstream, b'{"prompt": ["a", "b"], "stream": true}')
    async with asyncio.timeout(PATIENCE_S):
        assert await Fanout(context, call, cast(Client, client), arrival).run() is client.response
    assert client.gone
