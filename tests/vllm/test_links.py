"""What a router over real vLLM servers knows of the link, though streams come without a report of their transfer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.vllm.pair import Pair, prompt
from tests.vllm.routed import PATIENT, READY_S, ask_router, completion, links, routed
from tollbridge.config.cluster import SloConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NEVER = msgspec.structs.replace(PATIENT, trial_after_s=1e9)
SPARES_STREAMS = SloConfig(ttft_s=60.0, tpot_s=10.0, itl_p99_s=0.001)  # any prefill breaks gaps
AT_ONCE = msgspec.structs.replace(PATIENT, trial_after_s=0.0, trial_timeout_s=READY_S)


async def running(session: aiohttp.ClientSession, url: str, worker: str) -> int:
    """Return how many streams the router believes a worker to decode."""
    async with session.get(url + "/fleet") as answer:
        loads = {each["name"]: each["load"] for each in (await answer.json())["workers"]}
    return int(loads[worker]["num_running"] - loads[worker]["num_prefills"])


async def test_a_router_that_sees_streams_only_learns_the_link(pair: Pair) -> None:
    async with routed(pair, NEVER) as (url, session):
        for seed in range(70, 80):  # what a token weighs the router knows once vLLM's metrics have said it
            await ask_router(session, url, prompt(900, seed=seed), stream=True)
            if known := await links(session, url):
                break
            await asyncio.sleep(1.0)
        assert [link["goodput_bytes_per_s"] > 1e5 for link in known.values()] == [True]


async def test_a_router_that_sees_nothing_tries_the_link(pair: Pair) -> None:
    async with routed(pair, AT_ONCE, policy="adaptive") as (url, session), asyncio.timeout(READY_S):
        while not (known := await links(session, url)):
            await asyncio.sleep(0.1)
        assert [link["goodput_bytes_per_s"] > 1e5 for link in known.values()] == [True]


async def test_a_stream_is_split_for_its_price(pair: Pair) -> None:
    """Beside a stream on the decode worker, which a prefill there would stop; the link is known from a trial."""
    async with routed(pair, AT_ONCE, policy="adaptive", slo=SPARES_STREAMS) as (url, session), asyncio.timeout(READY_S):
        while not await links(session, url):
            await asyncio.sleep(0.1)
        async with session.post(url + "/v1/completions", json=streamed(900, 70)) as first:
            assert decision_of(first)["reason"] == "unknown"
            await first.read()
        # Not through the router, whose choice for that stream depends on the machine: it sees it as another router's.
        async with session.post(pair.d.url + "/v1/completions", json=streamed(20, 71) | {"max_tokens": 1900}) as steady:
            await steady.content.readany()
            while not await running(session, url, "d"):
                await asyncio.sleep(0.1)
            async with session.post(url + "/v1/completions", json=streamed(900, 72)) as answer:
                decision = decision_of(answer)
                assert b"[DONE]" in await answer.read()
        assert (decision["choice"], decision["prefill"], decision["decode"]) == ("split", "p", "d")
        async with session.get(f"{url}/decisions/{decision['id']}") as answer:
            record = await answer.json()
        assert record["decision"]["reason"] == "split_pays"
        assert record["happened"]["split_verified"]


def streamed(num_tokens: int, seed: int) -> dict[str, Any]:
    return completion(prompt(num_tokens, seed=seed)) | {"stream": True}


def decision_of(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    return dict(json.loads(answer.headers["x-tollbridge-decision"]))
