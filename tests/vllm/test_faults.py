"""Two real vLLM servers on a slow link, with whatever can go wrong: clients leave, workers stop, die and come back.

Blocks of 32 tokens, steps of 32 tokens (a long prompt takes many), a link of 0.7 MB/s (a load takes seconds), and
deadlines that no busy machine lets pass by itself: they cost time only where a test is about them. Every wait is for
what was to happen. The last tests kill workers; they are last on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.pair import Pair, Server, outcome, prompt, report, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

BLOCK = 32
NUM_BLOCKS = 72  # of the prefill worker; vLLM keeps one to itself
LONG = 1200  # tokens: 150 steps of prefill, 2.4 MB of KV
LONGEST = 1900  # 4 MB: still on its way when a worker is stopped, however busy the machine is
WAIT_S = 15.0
DEADLINES = {
    "heartbeat_s": 0.5,
    "progress_timeout_s": WAIT_S,
    "unknown_timeout_s": WAIT_S,
    "open_timeout_s": 3 * WAIT_S,  # on a busy machine decode comes after prompts that take some seconds each
    "handshake_timeout_s": WAIT_S,
}


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("faults")
    args = ("--block-size", str(BLOCK), "--max-model-len", "2048", "--max-num-batched-tokens", "32")
    small = (*args, "--num-gpu-blocks-override", str(NUM_BLOCKS), "--long-prefill-token-threshold", "8")
    p = Server("p", tiny_model, folder, small, {**DEADLINES, "bandwidth_cap_bytes_per_s": 7e5})
    with Pair(p, Server("d", tiny_model, folder, args, dict(DEADLINES))).running() as pair:
        yield pair


@contextlib.asynccontextmanager
async def leg(pair: Pair, role: str, text: list[int], key: str) -> AsyncIterator[asyncio.Task[dict[str, Any]]]:
    """Run one leg as a task; leaving the block hangs up."""
    server, max_tokens = (pair.p, 1) if role == "prefill" else (pair.d, 12)
    params = pair.params(role, key)  # type: ignore[arg-type]
    task = asyncio.create_task(pair.complete(server, text, max_tokens, params))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


@contextlib.asynccontextmanager
async def loading(pair: Pair, text: list[int], key: str) -> AsyncIterator[tuple[asyncio.Task[Any], asyncio.Task[Any]]]:
    """Run decode's leg, and prefill's once decode waits for it, on a busy machine too; yield (decode, prefill)."""
    async with leg(pair, "decode", text, key) as decode:
        await pair.parked(decode)
        async with leg(pair, "prefill", text, key) as prefill:
            yield decode, prefill


async def works(pair: Pair, seed: int) -> None:
    """Check that a split still works."""
    text = prompt(200, seed)
    _, decode = await pair.split(text)
    assert outcome(decode) == "done"
    assert tokens(decode) == await pair.local(text)


async def test_slow_link(pair: Pair) -> None:
    text = prompt(LONG, seed=1)
    async with loading(pair, text, secrets.token_hex(16)) as (answer, _):
        decode = await answer
    assert tokens(decode) == await pair.local(text)
    assert report(decode)["transfer"]["num_frames"] > 8  # layer by layer, chunk by chunk
    assert await pair.idle()


async def test_decode_leaves_before_prefill_comes(pair: Pair) -> None:
    text, key = prompt(300, seed=2), secrets.token_hex(16)
    before = await pair.sends("cancelled")
    async with leg(pair, "decode", text, key) as decode:
        await pair.parked(decode)
    assert await pair.idle(pair.d)
    await pair.complete(pair.p, text, 1, pair.params("prefill", key))
    assert await pair.idle(pair.p)
    await pair.sends_become(before + 1, "cancelled")  # told by decode, not by the deadline


async def test_the_other_leg_never_comes(pair: Pair) -> None:
    """Prefill frees its blocks, and decode computes for itself; two transfers, for both have to wait."""
    text = prompt(300, seed=4)
    prefill = pair.complete(pair.p, prompt(300, seed=3), 1, pair.params("prefill", secrets.token_hex(16)))
    decode = pair.complete(pair.d, text, 12, pair.params("decode", secrets.token_hex(16)))
    _, answer = await asyncio.gather(prefill, decode)
    assert outcome(answer) == "unknown_transfer"
    assert tokens(answer) == await pair.local(text)
    assert await pair.idle()


async def test_the_router_releases_what_decode_never_asks_for(pair: Pair) -> None:
    before, text, key = await pair.sends("cancelled"), prompt(300, seed=17), secrets.token_hex(16)
    await pair.complete(pair.p, text, 1, pair.params("prefill", key))
    await pair.release(key)
    assert await pair.idle(pair.p)
    await pair.sends_become(before + 1, "cancelled")  # and not failed by the deadline
    decode = await pair.complete(pair.d, text, 12, pair.params("decode", key))
    assert outcome(decode) == "peer_cancelled"
    assert tokens(decode) == await pair.local(text)


async def test_pinned_blocks_have_a_bound(pair: Pair) -> None:
    """71 blocks, of which 35 may be pinned: the third send of 15 is given up, the older ones are there for decode."""
    assert await pair.metric(pair.p, "vllm:tollbridge_max_pinned_blocks") == NUM_BLOCKS // 2
    texts, keys = [prompt(470, seed=20 + index) for index in range(3)], [secrets.token_hex(16) for _ in range(3)]
    for text, key in zip(texts, keys, strict=True):
        await pair.complete(pair.p, text, 1, pair.params("prefill", key))
    loads = [pair.complete(pair.d, text, 12, pair.params("decode", key)) for text, key in zip(texts, keys, strict=True)]
    answers = await asyncio.gather(*loads)
    assert [outcome(decode) for decode in answers] == ["done", "done", "pinned_bound"]
    assert [tokens(decode) for decode in answers] == [await pair.local(text) for text in texts]
    assert await pair.idle()
    await pair.becomes(0, pair.p, "vllm:tollbridge_pinned_blocks")


async def test_a_request_that_starves_gets_pinned_blocks(pair: Pair) -> None:
    """Two sends of 15 blocks are within the bound, but 48 of 71 are needed at once: the newest goes."""
    texts, keys = [prompt(470, seed=30 + index) for index in range(2)], [secrets.token_hex(16) for _ in range(2)]
    for text, key in zip(texts, keys, strict=True):
        await pair.complete(pair.p, text, 1, pair.params("prefill", key))
    big = prompt(48 * BLOCK - 20, seed=32)
    before = await pair.metric(pair.p, "vllm:tollbridge_failures_total", side="send", reason="pinned_bound")
    assert tokens(await pair.complete(pair.p, big, 12)) == await pair.local(big)
    await pair.becomes(before + 1, pair.p, "vllm:tollbridge_failures_total", side="send", reason="pinned_bound")
    await pair.release(keys[0])
    assert await pair.idle()


@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.9])
async def test_decode_leaves_while_loading(pair: Pair, after_s: float) -> None:
    text, key = prompt(LONG, seed=5), secrets.token_hex(16)
    async with leg(pair, "prefill", text, key) as prefill:
        async with leg(pair, "decode", text, key):
            await asyncio.sleep(after_s)
        await prefill
    # decode may have left before its engine knew of it: then prefill can only wait for the deadline
    assert await pair.idle()


async def test_prefill_leaves_while_it_computes(pair: Pair) -> None:
    """Where prefill hears of it only when all is computed, the send goes on without its client: then once more."""
    for seed in range(60, 66):
        text, key = prompt(LONGEST, seed), secrets.token_hex(16)
        async with leg(pair, "decode", text, key) as decode:
            await pair.parked(decode)
            async with leg(pair, "prefill", text, key):
                await pair.moving(decode)
            answer = await decode
        assert tokens(answer) == await pair.local(text)
        assert await pair.idle()
        if outcome(answer) != "done":
            assert report(answer)["computed_tokens"] == LONGEST
            return
    raise AssertionError("prefill never heard that its client had left")


async def test_prefill_is_preempted(pair: Pair) -> None:
    """Local requests on P outgrow its small cache, so the send, which came last, loses its blocks and starts over.

    71 blocks: four locals begin with 13 each, and the send is admitted with 15 more. At 8 tokens a step it takes 56
    steps; long before that the locals need a 14th and a 15th block each. Where the send comes so late that they have
    ended, once more.
    """
    before = await pair.metric(pair.p, "vllm:num_preemptions_total")
    for seed in range(70, 76):
        text, key = prompt(450, seed), secrets.token_hex(16)
        async with leg(pair, "decode", text, key) as task:
            await pair.parked(task)
            texts = [prompt(408, 4 * seed + index) for index in range(4)]
            locals_ = [asyncio.create_task(pair.complete(pair.p, each, 120)) for each in texts]
            while await pair.metric(pair.p, "vllm:num_requests_running") < 4 and not any(t.done() for t in locals_):
                await asyncio.sleep(0.01)
            async with leg(pair, "prefill", text, key):
                decode = await task
        await asyncio.gather(*locals_)
        assert tokens(decode) == await pair.local(text)
        assert outcome(decode) == "done"
        assert await pair.idle()
        if await pair.metric(pair.p, "vllm:num_preemptions_total") > before:
            return
    raise AssertionError("prefill had room for all")


async def test_clients_that_leave_at_random(pair: Pair) -> None:
    rng = random.Random(8)
    limit = asyncio.Semaphore(8)

    async def one(index: int) -> None:
        text, key = prompt(rng.choice([33, 150, 400, 700]), seed=100 + index), secrets.token_hex(16)
        hang_up = {role: rng.uniform(0, 1.5) if rng.random() < 0.4 else None for role in ("prefill", "decode")}

        async def run(role: str) -> dict[str, Any] | None:
            await asyncio.sleep(rng.uniform(0, 0.3))
            async with leg(pair, role, text, key) as task:
                done, _ = await asyncio.wait([task], timeout=hang_up[role])
                return await task if done else None

        async with limit:
            _, decode = await asyncio.gather(run("prefill"), run("decode"))
        if decode is not None:
            assert tokens(decode) == await pair.local(text)

    await asyncio.gather(*(one(index) for index in range(24)))
    assert await pair.idle()
    await works(pair, seed=9)


async def test_prefill_freezes(pair: Pair) -> None:
    await works(pair, seed=16)  # so that there is a connection
    text = prompt(LONGEST, seed=10)
    assert pair.p.process is not None
    group = pair.p.process.pid
    key = secrets.token_hex(16)
    async with loading(pair, text, key) as (decode, _):
        await pair.moving(decode)
        os.killpg(group, signal.SIGSTOP)
        try:
            answer = await decode
        finally:
            os.killpg(group, signal.SIGCONT)
    assert outcome(answer) == "stalled"
    assert tokens(answer) == await pair.local(text)
    assert await pair.idle()
    await works(pair, seed=11)


async def test_prefill_dies_and_comes_back(pair: Pair) -> None:
    text, key = prompt(LONGEST, seed=12), secrets.token_hex(16)
    other = prompt(200, seed=13)
    async with loading(pair, text, key) as (decode, _):
        bystander = asyncio.create_task(pair.complete(pair.d, other, 12))
        await pair.moving(decode)
        pair.p.stop(signal.SIGKILL)
        answer = await decode
    assert outcome(answer) == "peer_lost"
    assert tokens(answer) == await pair.local(text)
    assert tokens(await bystander) == await pair.local(other)
    assert await pair.idle(pair.d)
    pair.p.start()
    await asyncio.to_thread(pair.p.wait_ready)
    await pair.complete(pair.p, other, 1)  # the first request after a start is slow
    await works(pair, seed=14)


async def test_decode_dies_while_loading(pair: Pair) -> None:
    text, key = prompt(LONGEST, seed=15), secrets.token_hex(16)
    async with loading(pair, text, key) as (decode, prefill):
        await pair.moving(decode)
        pair.d.stop(signal.SIGKILL)
        await asyncio.wait([decode])
        await prefill
    assert await pair.idle(pair.p)
