"""The router over two real vLLM servers with their own NIXL connectors: a split happens, is right, is verified."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from tests.vllm.pair import Pair, Server, prompt
from tests.vllm.routed import PATIENT, READY_S, ask_router, links, routed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

LEASE_S = 60.0  # a prefill keeps KV that nobody asks for so long; on a busy machine the connectors take 20 s to meet
LIMITS = msgspec.structs.replace(PATIENT, push_patience_s=LEASE_S)


@pytest.fixture(scope="module", params=["nixl", "nixl-push"])
def pair(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    args = ("--max-model-len", "2048", "--max-num-batched-tokens", "500")
    more = {"kv_lease_duration": int(LEASE_S)}
    p, d = (Server(name, tiny_model, folder, args, transfer=more, media=request.param) for name in "pd")
    pair = Pair(p, d)
    try:
        pair.start()
        p.unpin()
        d.unpin()
        yield pair
    finally:
        pair.stop()


async def test_splits_equal_local_and_are_verified(pair: Pair) -> None:
    """Around block and chunk edges, one after the other and four at a time, streamed and whole."""
    lengths = [2, 127, 128, 129, 257, 499, 501, 1001]
    prompts = [prompt(length, seed=9000 + length) for length in lengths]
    expected = [await pair.local(text) for text in prompts]
    before = await pair.metric(pair.d, "vllm:external_prefix_cache_hits_total")
    async with routed(pair, LIMITS) as (url, session):
        await ask_router(session, url, prompt(40, seed=1), stream=False)  # the connectors meet
        alone = [await ask_router(session, url, text, stream=len(text) % 2 == 0) for text in prompts[:4]]
        together = await asyncio.gather(*(ask_router(session, url, text, stream=True) for text in prompts[4:]))
    answers = [*alone, *together]
    assert [got for got, _ in answers] == expected
    assert all(happened["split_verified"] for _, happened in answers), [h["error"] for _, h in answers]
    loaded = await pair.metric(pair.d, "vllm:external_prefix_cache_hits_total") - before
    assert loaded >= sum(lengths) - len(lengths)
    assert await pair.idle()


async def test_a_trial_learns_the_link_and_strands_nothing(pair: Pair) -> None:
    """Under `adaptive` no client's request is risked on a link that nobody has seen: the router sends its own."""
    at_once = msgspec.structs.replace(LIMITS, trial_after_s=0.0, trial_timeout_s=READY_S)
    async with routed(pair, at_once, policy="adaptive") as (url, session), asyncio.timeout(READY_S):
        while not (known := await links(session, url)):
            await asyncio.sleep(0.1)
        assert [link["goodput_bytes_per_s"] > 1e5 for link in known.values()] == [True]
    assert await pair.idle()


async def test_client_that_leaves_strands_nothing(pair: Pair) -> None:
    """For longer than the lease: of KV whose client left as prefill answered nobody knows.

    A push is made all the same: decode would keep the blocks that wait for it for ever.
    """
    text = prompt(200, seed=2)
    async with routed(pair, LIMITS) as (url, session):
        await ask_router(session, url, prompt(40, seed=3), stream=False)  # from here on a push has both legs at once
        for wait_s in (0.02, 0.1, 0.3):
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await ask_router(session, url, prompt(1500, seed=int(wait_s * 1000)), stream=False)
        assert await pair.idle()
        got, happened = await ask_router(session, url, text, stream=False)
    assert happened["split_verified"] is True
    assert got == await pair.local(text)
