"""A stream of a real vLLM whose server dies under it: another one finishes it, with the text that it would have had."""

from __future__ import annotations

import json
import secrets
from typing import Any

import aiohttp
import pytest

from tests.support.cut_proxy import cut_proxy
from tests.vllm.pair import SECRET, Pair, prompt
from tests.vllm.routed import PATIENT, both_ready
from tollbridge.config.cluster import ClusterConfig, RouterConfig, WorkerConfig
from tollbridge.router.main import listening
from tollbridge.wire import sse

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_TOKENS = 40


def body(text: list[int], **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": text, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip


async def said(session: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    """Return text and usage of a stream, and the id of its decision if it has one."""
    async with session.post(url + "/v1/completions", json=request) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
        name = json.loads(answer.headers.get("x-tollbridge-decision", '{"id": ""}'))["id"]
    events = list(sse.Parser().feed(raw))
    assert events[-1] == b"[DONE]", events[-1]
    chunks = [json.loads(event) for event in events[:-1]]
    assert not [chunk for chunk in chunks if "error" in chunk]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return text, next(chunk["usage"] for chunk in chunks if chunk.get("usage")), name


@pytest.mark.parametrize("events", [1, 17])
async def test_a_split_stream_survives_its_decode_worker(pair: Pair, events: int) -> None:
    for attempt in range(5):
        text = prompt(200, seed=700 + 10 * attempt + events)
        record = await cut_after(pair, text, events)
        if record["decision"]["why"].endswith(" continues."):  # a busy vLLM may put all tokens in a few events
            break
    assert (record["decision"]["reason"], record["decision"]["decode"]) == ("continued", "p")
    assert await pair.idle()


async def cut_after(pair: Pair, text: list[int], events: int) -> dict[str, Any]:
    """Stream the answer to `text` from a server that is lost after `events` events, and check that it is whole.

    Returns the router's record of it, which says whether there were so many.
    """
    async with cut_proxy("127.0.0.1", pair.d.port, events=events) as proxy, aiohttp.ClientSession() as session:
        expected, usage, _ = await said(session, pair.p.url, body(text, cache_salt=secrets.token_hex(8)))
        workers = [
            WorkerConfig(name="p", prefer="prefill", engine="vllm", url=pair.p.url, kv=f"127.0.0.1:{pair.p.kv_port}"),
            WorkerConfig(name="d", prefer="decode", engine="vllm", url=proxy.url, kv=f"127.0.0.1:{pair.d.kv_port}"),
        ]
        cluster = ClusterConfig(router=RouterConfig(port=0, policy="split"), workers=workers)
        async with listening(cluster, SECRET.encode(), limits=PATIENT) as url:
            await both_ready(session, url)
            got, got_usage, name = await said(session, url, body(text))
            async with session.get(f"{url}/decisions/{name}") as answer:
                record: dict[str, Any] = await answer.json()
    assert proxy.is_cut == (record["decision"]["reason"] == "continued")
    assert got == expected
    assert [got_usage[key] for key in ("prompt_tokens", "completion_tokens")] == [200, NUM_TOKENS]
    assert usage["completion_tokens"] == NUM_TOKENS
    return record
