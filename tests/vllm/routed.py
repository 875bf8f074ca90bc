"""The router over two real vLLM servers, and one request through it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.vllm.pair import SECRET, Pair, Server
from tollbridge.config.cluster import ClusterConfig, RouterConfig, SloConfig, WorkerConfig
from tollbridge.policy.views import Prefer
from tollbridge.router.limits import Limits
from tollbridge.router.main import listening
from tollbridge.wire import sse

READY_S = 600.0
# What is late on a busy machine is no reason to serve alone, or by text instead of tokens.
PATIENT = Limits(
    connect_timeout_s=60.0,
    check_timeout_s=60.0,
    tokenize_timeout_s=60.0,
    detokenize_timeout_s=60.0,
    prefill_grace_s=10.0,
)


@asynccontextmanager
async def routed(
    pair: Pair, limits: Limits = PATIENT, policy: str = "split", slo: SloConfig | None = None
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """Run a router, by default one that splits everything; yield its URL and a client."""
    sides: list[tuple[str, Prefer, Server]] = [("p", "prefill", pair.p), ("d", "decode", pair.d)]
    workers = [
        WorkerConfig(
            name=name,
            prefer=prefer,
            engine="vllm",
            connector=server.media,
            url=server.url,
            kv=f"127.0.0.1:{server.kv_port}",
        )
        for name, prefer, server in sides
    ]
    router = RouterConfig(port=0, policy=policy)
    cluster = ClusterConfig(router=router, workers=workers, slo=slo or SloConfig())
    async with listening(cluster, SECRET.encode(), limits=limits) as url, aiohttp.ClientSession() as session:
        await both_ready(session, url)
        yield url, session


async def both_ready(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until the router has seen both workers well: their machine may be busy."""
    async with asyncio.timeout(READY_S):
        while True:
            async with session.get(url + "/health") as answer:
                workers = (await answer.json())["workers"]
            if all(worker["ready"] for worker in workers.values()):
                return
            await asyncio.sleep(0.1)


async def links(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return what the router knows of each link."""
    async with session.get(url + "/fleet") as answer:
        return dict((await answer.json())["cost"]["links"])


def completion(text: list[int]) -> dict[str, Any]:
    """Return a request for twelve greedy tokens, to be answered by their ids."""
    return {
        "model": "tiny", "prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "detokenize": False,
    }  # fmt: skip


async def ask_router(
    session: aiohttp.ClientSession, url: str, text: list[int], stream: bool
) -> tuple[list[int], dict[str, Any]]:
    """Return the token ids and what the router's record says of the request."""
    async with session.post(url + "/v1/completions", json=completion(text) | {"stream": stream}) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
        decision = json.loads(answer.headers["x-tollbridge-decision"])
    assert decision["choice"] == "split"
    chunks = [json.loads(data) for data in sse.Parser().feed(raw) if data != b"[DONE]"] if stream else [json.loads(raw)]
    assert all("kv_transfer_params" not in chunk and chunk["choices"] for chunk in chunks)
    got = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or ()]
    async with session.get(f"{url}/decisions/{decision['id']}") as answer:
        return got, (await answer.json())["happened"]
