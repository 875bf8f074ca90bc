"""One request against a pair of vLLM servers, alone on one of them or split by a transport, as the client sees it."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from typing import Any

import aiohttp
import msgspec

from benchmarks.gpu.servers import SECRET, Pair, Server
from benchmarks.support.client import Stream, stream
from tollbridge.wire.params import Role, TransferParams, sign

VOCABULARY = (10, 150_000)


def draw(rng: random.Random, num_tokens: int) -> list[int]:
    """Return random token ids: no prefix cache has seen them."""
    return [rng.randint(*VOCABULARY) for _ in range(num_tokens)]


def body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip


async def single(
    session: aiohttp.ClientSession, server: Server, prompt: list[int], max_tokens: int, into: Stream
) -> Stream:
    """One server does both."""
    return await stream(session, server.url, body(prompt, max_tokens), into=into)


async def split(
    session: aiohttp.ClientSession, pair: Pair, prompt: list[int], max_tokens: int, result: Stream
) -> Stream:
    """Split by the pair's transport; TTFT counts from when the first leg is sent."""
    sent_s = time.monotonic()
    if pair.is_ours:
        await _tollbridge(session, pair, prompt, max_tokens, result)
    elif pair.transport == "nixl-push":
        await _nixl_push(session, pair, prompt, max_tokens, result)
    else:
        await _nixl_pull(session, pair, prompt, max_tokens, result)
    result.sent_s = sent_s
    return result


async def _tollbridge(
    session: aiohttp.ClientSession, pair: Pair, prompt: list[int], max_tokens: int, result: Stream
) -> None:
    transfer_id = secrets.token_hex(16)

    def params(role: Role) -> dict[str, Any]:
        unsigned = TransferParams(
            v=1, transfer_id=transfer_id, role=role, host="127.0.0.1", port=pair.prefill.kv_port,
            expires=time.time() + 60,
        )  # fmt: skip
        signed: dict[str, Any] = msgspec.to_builtins(sign(unsigned, SECRET.encode()))
        return {"kv_transfer_params": {"tollbridge": signed}}

    await asyncio.gather(
        _prefill(session, pair, body(prompt, 1) | params("prefill"), {}),
        stream(session, pair.decode.url, body(prompt, max_tokens) | params("decode"), into=result),
    )


async def _nixl_pull(
    session: aiohttp.ClientSession, pair: Pair, prompt: list[int], max_tokens: int, result: Stream
) -> None:
    answer = await _prefill(session, pair, body(prompt, 1) | {"kv_transfer_params": _remote_decode()}, {})
    relay = {"kv_transfer_params": answer["kv_transfer_params"]}
    await stream(session, pair.decode.url, body(prompt, max_tokens) | relay, into=result)


_engine_ids: dict[str, dict[str, Any]] = {}  # of prefill servers, by name: learnt from a first request


async def _nixl_push(
    session: aiohttp.ClientSession, pair: Pair, prompt: list[int], max_tokens: int, result: Stream
) -> None:
    if pair.prefill.name not in _engine_ids:
        warm = await _prefill(session, pair, body(prompt[:64], 1) | {"kv_transfer_params": _remote_decode()}, {})
        _engine_ids[pair.prefill.name] = warm["kv_transfer_params"]
    request_id = secrets.token_hex(8)
    known = _engine_ids[pair.prefill.name]
    decode = {**known, "remote_request_id": f"cmpl-{request_id}", "remote_block_ids": []}
    headers = {"X-Request-Id": request_id}
    await asyncio.gather(
        _prefill(session, pair, body(prompt, 1) | {"kv_transfer_params": _remote_decode()}, headers),
        stream(session, pair.decode.url, body(prompt, max_tokens) | {"kv_transfer_params": decode}, into=result,
               headers=headers),
    )  # fmt: skip


async def verified_splits(session: aiohttp.ClientSession, pair: Pair) -> int:
    """Return how many loads of `pair` ended done, as decode's metrics say; RuntimeError when one did not."""
    async with session.get(pair.decode.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    outcomes = dict.fromkeys(("done", "failed"), 0)
    for line in lines:
        if line.startswith("vllm:tollbridge_transfers_total{") and 'side="receive"' in line:
            outcome = "done" if 'outcome="done"' in line else "failed"
            outcomes[outcome] += int(float(line.rpartition(" ")[2]))
    if outcomes["failed"] or not outcomes["done"]:
        raise RuntimeError(f"{pair.transport}: {outcomes['done']} splits came about, {outcomes['failed']} did not")
    return outcomes["done"]


def _remote_decode() -> dict[str, Any]:
    return {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None,
    }  # fmt: skip


async def _prefill(
    session: aiohttp.ClientSession, pair: Pair, leg: dict[str, Any], headers: dict[str, str]
) -> dict[str, Any]:
    async with session.post(pair.prefill.url + "/v1/completions", json=leg, headers=headers) as response:
        answer: dict[str, Any] = await response.json(content_type=None)
        if response.status != 200:
            raise RuntimeError(f"{pair.prefill.name} answered {response.status}: {str(answer)[:300]}")
        return answer
