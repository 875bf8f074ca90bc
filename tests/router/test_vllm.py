"""Workers that are vLLM servers: no /tollbridge/status, no report on a stream; usage says what was loaded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.router_rig import Rig, rig
from tests.support.stub_worker import StubWorker

STREAM: dict[str, Any] = {"prompt": "Hello", "max_tokens": 8, "stream": True}


@asynccontextmanager
async def vllm_pair(cached_tokens: int | None) -> AsyncIterator[Rig]:
    stubs = StubWorker("p0", "prefill"), StubWorker("d0", "decode")
    for stub in stubs:
        stub.engine_kind, stub.stock = "vllm", True
        stub.usage_details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    async with rig(*stubs) as r:
        yield r


@pytest.mark.parametrize(
    ("cached_tokens", "verified", "reason"), [(99, True, ""), (0, False, "not_loaded"), (None, False, "no_report")]
)
async def test_split_is_judged_by_usage(cached_tokens: int | None, verified: bool, reason: str) -> None:
    async with vllm_pair(cached_tokens) as r:
        answer = await r.post(STREAM, policy="split", x_request_id="one")
        assert answer.text == "Hello world"
        assert answer.events[-1] == "[DONE]"
        assert all(event == "[DONE]" or event["choices"] for event in answer.events)  # the client asked no usage
        happened = (await r.record("one"))["happened"]
        assert happened["split_verified"] is verified
        assert (happened["prompt_tokens"], happened["completion_tokens"]) == (100, 4)
        if not verified:
            assert await r.metric("split_unverified_total", reason=reason) == 1


async def test_usage_that_the_client_asked_for_reaches_it() -> None:
    async with vllm_pair(99) as r:
        answer = await r.post(STREAM | {"stream_options": {"include_usage": True}}, policy="split")
        assert answer.events[-2]["usage"]["prompt_tokens"] == 100


async def test_other_stream_options_are_kept() -> None:
    async with vllm_pair(99) as r:
        options = {"continuous_usage_stats": True, "another": 1}  # the first means nothing without a usage chunk
        await r.post(STREAM | {"stream_options": options}, policy="split", x_request_id="two")
        (leg,) = [seen for seen in r["d0"].seen if seen.role == "decode"]
        assert leg.body["stream_options"] == {"continuous_usage_stats": False, "another": 1, "include_usage": True}
        assert (await r.record("two"))["happened"]["split_verified"] is True


async def test_lengths_of_a_local_stream_are_known_and_hidden() -> None:
    """What a prefill and a step take is learnt from them: nothing else says how long a stream of vLLM was."""
    async with vllm_pair(0) as r:
        answer = await r.post(STREAM, policy="local", x_request_id="three")
        assert all(event == "[DONE]" or event["choices"] for event in answer.events)
        happened = (await r.record("three"))["happened"]
        assert (happened["prompt_tokens"], happened["completion_tokens"]) == (100, 4)


@pytest.mark.parametrize(
    "body",
    [
        {**STREAM, "stream": False},
        {**STREAM, "stream_options": {"include_usage": True}},
        {**STREAM, "stream_options": []},  # for the worker to refuse
    ],
)
async def test_local_request_that_says_its_lengths_is_passed_as_it_is(body: dict[str, object]) -> None:
    async with vllm_pair(0) as r:
        await r.post(body, policy="local")
        (seen,) = r["p0"].seen + r["d0"].seen
        assert seen.body == {**seen.body, **body}
        assert ("stream_options" in seen.body) is ("stream_options" in body)


async def test_streams_alone_make_engines_known() -> None:
    async with vllm_pair(0) as r:
        first = await r.post(STREAM, policy="adaptive")
        assert first.decision["reason"] == "unknown"
        second = await r.post(STREAM, policy="adaptive")
        assert second.decision["reason"] != "unknown"


async def test_several_choices_are_split() -> None:
    async with vllm_pair(99) as r:
        assert (await r.post(STREAM | {"n": 3}, policy="split")).decision["choice"] == "split"
        (prefill,), (decode,) = r["p0"].seen, r["d0"].seen
        assert (prefill.body["n"], decode.body["n"]) == (1, 3)


async def test_several_choices_of_embedded_workers_are_split() -> None:
    """Prefill makes one, decode all of them."""
    async with rig(policy="split") as r:
        assert (await r.post(STREAM | {"n": 3})).decision["choice"] == "split"
        assert (await r.post(STREAM | {"best_of": 2})).decision["choice"] == "split"
        bodies = [seen.body for seen in (*r["p0"].seen, *r["d0"].seen)]
        assert [body.get("n") for body in bodies] == [1, None, 3, None]


async def test_an_adapter_is_served_locally_and_says_so() -> None:
    async with vllm_pair(99) as r:
        cards = [{"id": "stub-model"}, {"id": "poet", "root": "/adapters/poet", "parent": "stub-model"}]
        for stub in r.workers.values():
            stub.odd_models = json.dumps({"object": "list", "data": cards}).encode()
            stub.healthy = False
            await r.until_ready(stub.name, False)
            stub.healthy = True
            await r.until_ready(stub.name)
        answer = await r.post(STREAM | {"model": "poet"}, policy="split")
        assert (answer.decision["choice"], answer.decision["reason"]) == ("local", "lora_adapter")
        assert (await r.post(STREAM | {"model": "stub-model"}, policy="split")).decision["choice"] == "split"


async def test_load_comes_from_the_metrics_and_events_from_where_vllm_says() -> None:
    stub = StubWorker("v0")
    stub.engine_kind, stub.stock = "vllm", True
    stub.metrics = (
        'vllm:num_requests_running{engine="0"} 3\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1\n'
    )
    stub.event_sources = {
        "0": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None}
    }
    async with rig(stub) as r:
        (worker,) = (await r.get("/fleet")).json["workers"]
        assert worker["events"] == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]
        load = worker["load"]
        assert (load["block_size"], load["num_running"]) == (32, 3)
        assert (load["free_kv_tokens"], load["used_kv_tokens"]) == (1600, 1600)
