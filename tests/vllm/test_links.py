"""What a router over real vLLM servers knows of the link, though streams come without a report of their transfer."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.vllm.pair import Pair, prompt
from tests.vllm.routed import PATIENT, READY_S, ask_router, routed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NEVER = msgspec.structs.replace(PATIENT, trial_after_s=1e9)
AT_ONCE = msgspec.structs.replace(PATIENT, trial_after_s=0.0, trial_timeout_s=READY_S)


async def links(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url + "/fleet") as answer:
        return dict((await answer.json())["cost"]["links"])


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
