"""Two real vLLM servers: a split gives what a local run gives, token for token, with hits on either side."""

from __future__ import annotations

import asyncio
import random
import secrets
from typing import Any

import pytest

from tests.vllm.conftest import BLOCK, CHUNK
from tests.vllm.pair import Pair, outcome, prompt, report, tokens
from tests.vllm.routed import ask_router, routed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

LENGTHS = [
    *[1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1],
    *[CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, CHUNK + BLOCK, CHUNK + BLOCK + 1],
    *[2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 2 * CHUNK + 2],
]


@pytest.mark.parametrize("length", LENGTHS)
async def test_edges(pair: Pair, length: int) -> None:
    text = prompt(length, seed=length)
    prefill, decode = await pair.split(text)
    expected = await pair.local(text)
    assert tokens(decode) == expected
    assert tokens(prefill) == expected[:1]
    assert report(decode).get("loaded_tokens", 0) == length - 1
    assert decode["usage"]["prompt_tokens_details"]["cached_tokens"] == length - 1
    num_blocks = -(-(length - 1) // BLOCK)
    block_bytes = 4 * 2 * BLOCK * 2 * 32 * 4  # layers, heads, tokens, K and V, head size, float32
    assert report(decode).get("transfer", {}).get("payload_bytes", 0) == num_blocks * block_bytes


@pytest.mark.parametrize("where", ["p", "d", "pd"])
@pytest.mark.parametrize(
    ("length", "more"), [(BLOCK, 10), (2 * BLOCK, BLOCK), (3 * BLOCK + 5, BLOCK - 5), (CHUNK, 1), (CHUNK + 7, CHUNK)]
)
async def test_prefix_hits(pair: Pair, where: str, length: int, more: int) -> None:
    text = prompt(length + more, seed=1000 * length + more + len(where) + ord(where[0]))
    for server in (pair.p, pair.d):
        if server.name in where:
            await pair.complete(server, text[:length], 1)
    prefill, decode = await pair.split(text)
    hit = length // BLOCK * BLOCK
    on_d = hit if "d" in where else 0
    assert tokens(decode) == await pair.local(text)
    assert report(prefill).get("cached_tokens", 0) == (hit if "p" in where else 0)
    assert report(decode).get("cached_tokens", 0) == on_d
    assert report(decode).get("loaded_tokens", 0) == length + more - 1 - on_d


async def test_everything_is_on_decode_already(pair: Pair) -> None:
    text = prompt(2 * BLOCK + 1, seed=3)
    await pair.complete(pair.d, text, 1)
    _, decode = await pair.split(text)
    assert tokens(decode) == await pair.local(text)
    assert report(decode).get("loaded_tokens", 0) == 0
    assert await pair.idle()


async def test_eight_at_once_with_shared_prefixes(pair: Pair) -> None:
    """Hits on P may be in flight from another request, in the same step or an earlier one."""
    shared = prompt(2 * BLOCK, seed=4)
    rng = random.Random(5)
    lengths = [20, BLOCK, BLOCK + 1, CHUNK, CHUNK + 30]
    texts = [(shared if index % 2 else []) + prompt(rng.choice(lengths), seed=index) for index in range(32)]
    limit = asyncio.Semaphore(8)

    async def one(text: list[int]) -> list[int]:
        async with limit:
            _, decode = await pair.split(text)
        assert outcome(decode) == "done"
        return tokens(decode)

    answers = await asyncio.gather(*map(one, texts))
    for text, answer in zip(texts, answers, strict=True):
        assert answer == await pair.local(text)
    assert await pair.idle()


@pytest.mark.parametrize("first", ["p", "d"])
async def test_either_leg_first(pair: Pair, first: str) -> None:
    text, key = prompt(300, seed=ord(first)), secrets.token_hex(16)
    legs = {
        "p": lambda: pair.complete(pair.p, text, 1, pair.params("prefill", key)),
        "d": lambda: pair.complete(pair.d, text, 12, pair.params("decode", key)),
    }
    early = asyncio.create_task(legs.pop(first)())
    await asyncio.sleep(0.5)
    late = await legs.popitem()[1]()
    decode = await early if first == "d" else late
    await early
    assert outcome(decode) == "done"
    assert tokens(decode) == await pair.local(text)


async def test_several_answers_load_once(pair: Pair) -> None:
    text, key = prompt(2 * BLOCK + 9, seed=6), secrets.token_hex(16)
    before = await pair.metric(pair.d, "vllm:tollbridge_transfers_total", side="receive")
    _, decode = await asyncio.gather(
        pair.complete(pair.p, text, 1, pair.params("prefill", key)),
        pair.complete(pair.d, text, 8, pair.params("decode", key), n=3, temperature=1, top_k=1),
    )
    assert [choice["token_ids"] for choice in decode["choices"]] == [await pair.local(text, 8)] * 3
    await pair.becomes(before + 1, pair.d, "vllm:tollbridge_transfers_total", side="receive")


async def test_prompt_logprobs_compute_everything(pair: Pair) -> None:
    text = prompt(200, seed=7)
    _, decode = await pair.split(text, prompt_logprobs=0)
    assert tokens(decode) == await pair.local(text)
    assert report(decode).get("loaded_tokens", 0) == 0
    assert await pair.idle()


async def test_params_that_are_not_signed_are_served_locally(pair: Pair) -> None:
    text = prompt(200, seed=8)
    params = pair.params("decode", secrets.token_hex(16))
    params["tollbridge"]["sig"] = "0" * 64
    decode = await pair.complete(pair.d, text, 12, params)
    assert outcome(decode) == "declined"
    assert tokens(decode) == await pair.local(text)


async def test_another_prompt_on_the_other_side(pair: Pair) -> None:
    text, key = prompt(300, seed=9), secrets.token_hex(16)
    _, decode = await asyncio.gather(
        pair.complete(pair.p, prompt(300, seed=10), 1, pair.params("prefill", key)),
        pair.complete(pair.d, text, 12, pair.params("decode", key)),
    )
    assert outcome(decode) == "digest_mismatch"
    assert tokens(decode) == await pair.local(text)
    assert decode["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert await pair.idle()


async def test_metrics(pair: Pair) -> None:
    before = await pair.metric(pair.d, "vllm:tollbridge_loaded_tokens_total")
    await pair.split(prompt(401, seed=11))
    await pair.becomes(before + 400, pair.d, "vllm:tollbridge_loaded_tokens_total")
    assert await pair.metric(pair.d, "vllm:tollbridge_goodput_bytes_per_s") > 0
    assert await pair.metric(pair.d, "vllm:tollbridge_failures_total", reason="digest_mismatch") >= 1
    assert await pair.metric(pair.p, "vllm:tollbridge_transfers_total", side="send", outcome="done") > 0
    sent = await pair.metric(pair.p, "vllm:tollbridge_wire_bytes_total", side="send")
    received = await pair.metric(pair.d, "vllm:tollbridge_wire_bytes_total", side="receive")
    assert sent > 0
    assert received > 0


async def test_the_router_knows_what_a_token_weighs_and_what_a_step_takes(pair: Pair) -> None:
    await pair.split(prompt(200, seed=12))  # vLLM's metrics begin with the first step
    async with routed(pair) as (url, session):
        while True:
            async with session.get(url + "/fleet") as answer:
                loads = [worker["load"] for worker in (await answer.json())["workers"]]
            if all(load["kv_bytes_per_token"] for load in loads):
                break
    kappa = 4 * 2 * 2 * 32 * 4  # layers, heads, K and V, head size, float32
    assert [load["kv_bytes_per_token"] for load in loads] == [kappa, kappa]
    assert [load["max_num_batched_tokens"] for load in loads] == [CHUNK, CHUNK]


@pytest.mark.parametrize("stream", [False, True])
async def test_router_splits_and_verifies(pair: Pair, stream: bool) -> None:
    """Forty prompts around block and chunk edges, eight at a time: every split equals local, and is verified."""
    gate = asyncio.Semaphore(8)
    lengths = LENGTHS[2:] + [LENGTHS[at] + 3 for at in range(3, 18)] + [60, 200, 300, 700, 900, 1100, 1300]
    prompts = [prompt(length, seed=5000 + length + stream) for length in lengths]
    expected = [await pair.local(text) for text in prompts]
    async with routed(pair) as (url, session):

        async def ask(text: list[int]) -> tuple[list[int], dict[str, Any]]:
            async with gate:
                return await ask_router(session, url, text, stream)

        answers = await asyncio.gather(*(ask(text) for text in prompts))
    assert len(answers) == 40
    assert [got for got, _ in answers] == expected
    assert all(happened["split_verified"] for _, happened in answers), [h["error"] for _, h in answers]
