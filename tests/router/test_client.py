"""The client's side of a request, against sockets."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer

from tollbridge.router.client import Client
from tollbridge.router.upstream import ClientGoneError

PATIENCE_S = 60.0


async def test_the_end_of_a_stream_waits_only_so_long_for_who_does_not_read() -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def handle(request: web.Request) -> web.StreamResponse:
        client = Client(request, patience_s=0.1)
        await client.begin_stream("{}", b"x")
        client.write(bytes(64 << 20))  # more than all buffers hold
        try:
            await client.end_stream()
        except ClientGoneError as error:
            ended.set_result(str(error))
            client.drop()
        assert client.response is not None
        return client.response

    app = web.Application()
    app.router.add_get("/", handle)
    async with asyncio.timeout(PATIENCE_S), TestServer(app) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert "took nothing for 0.1 s" in await ended
        assert not (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()
