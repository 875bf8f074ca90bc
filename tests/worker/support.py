"""A real server in front of a fake engine, and a client."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.fake_engine import FakeEngine
from tollbridge.clock import SystemClock
from tollbridge.engine.base import Engine
from tollbridge.obs.metrics import WorkerMetrics
from tollbridge.transfer.base import TransferStatistics
from tollbridge.wire import sse
from tollbridge.wire.params import Role, TransferParams, sign
from tollbridge.worker.app import build_app, listen
from tollbridge.worker.bridge import Bridge
from tollbridge.worker.collector import StatisticsCollector
from tollbridge.worker.door import Door, Identity, Limits
from tollbridge.worker.events import EventPublisher
from tollbridge.worker.prompts import Prompts

SECRET = b"a-secret-of-the-worker-tests"
CLOCK = SystemClock()


def make_door(
    engine: Engine,
    *,
    secret: bytes | None = SECRET,
    max_open: int = 64,
    transfers: dict[str, TransferStatistics] | None = None,
    **limits: float,
) -> Door:
    """Call it on the event loop that will serve."""
    metrics = WorkerMetrics(engine.info.name)
    door = Door(
        engine=engine,
        identity=Identity(name="w0", incarnation="f00d", model_names=(engine.info.name, "alias"), kv="127.0.0.1:7801"),
        secret=secret,
        limits=Limits(max_open=max_open, max_body_bytes=4 << 20, **limits),
        clock=CLOCK,
        metrics=metrics,
        prompts=Prompts(engine.tokenizer, engine.info),
        bridge=Bridge(asyncio.get_running_loop(), CLOCK),
        transfers=lambda: transfers or {},
    )
    metrics.registry.register(StatisticsCollector(engine, door.transfers, metrics.labels))
    return door


@dataclass
class Client:
    """What tests need of HTTP."""

    url: str
    door: Door
    session: aiohttp.ClientSession
    engine: Any = field(repr=False)

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.read()

    async def complete(self, **body: object) -> dict[str, Any]:
        status, answer = await self.post("/v1/completions", {"prompt": "hello", "max_tokens": 4, **body})
        assert status == 200, answer
        return answer

    async def stream(self, path: str, body: dict[str, object], **headers: str) -> list[dict[str, Any]]:
        """Return the chunks, having checked the framing."""
        data = json.dumps({"stream": True, **body})
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            raw = await response.read()
            assert response.status == 200, raw
            assert response.content_type == "text/event-stream"
        assert raw.endswith(sse.DONE)
        assert raw.count(b"[DONE]") == 1
        return [json.loads(event) for event in sse.Parser().feed(raw.removesuffix(sse.DONE))]


@asynccontextmanager
async def serving(engine: Engine, events: EventPublisher | None = None, **door_options: Any) -> AsyncIterator[Client]:
    door = make_door(engine, **door_options)
    server = await listen(build_app(door, events), door.limits, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(server.url, door, session, engine)
    finally:
        await server.stop()
        door.prompts.close()


@asynccontextmanager
async def fake_serving(**door_options: Any) -> AsyncIterator[Client]:
    engine = FakeEngine()
    try:
        async with serving(engine, **door_options) as client:
            yield client
    finally:
        engine.shutdown()


def params(role: Role, *, secret: bytes = SECRET, transfer_id: str = "0" * 32, **fields: Any) -> dict[str, Any]:
    """Return a signed `kv_transfer_params`."""
    made = TransferParams(
        **{
            "v": 1,
            "transfer_id": transfer_id,
            "role": role,
            "host": "127.0.0.1",
            "port": 7801,
            "expires": CLOCK.wall() + 60,
            **fields,
        }
    )
    signed = sign(made, secret)
    return {"tollbridge": {name: getattr(signed, name) for name in signed.__struct_fields__}}


async def eventually(condition: Any, timeout_s: float = 60.0) -> None:
    """Wait until `condition()` holds: for what another thread or the kernel does, which no clock of ours drives."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
