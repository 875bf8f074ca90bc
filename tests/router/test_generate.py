"""Token ids in, token ids out: vLLM's /inference/v1/generate, whose sampling parameters are an object of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.router_rig import rig
from tests.support.stub_worker import Behaviour, StubWorker

PATH = "/inference/v1/generate"
BODY: dict[str, Any] = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8, "n": 1, "min_tokens": 2}}


async def test_a_split_has_two_legs() -> None:
    async with rig(policy="split") as r:
        answer = await r.post({**BODY, "stream": True, "return_token_ids": True}, path=PATH, x_request_id="ids")
        assert answer.events[-1] == "[DONE]"
        assert answer.decision["choice"] == "split"
        (prefill,), (decode,) = r["p0"].seen, r["d0"].seen
        assert prefill.path == decode.path == PATH
        assert prefill.body["sampling_params"] == {"max_tokens": 1, "n": 1}
        assert (prefill.body["stream"], "return_token_ids" in prefill.body) == (False, False)
        assert "max_tokens" not in prefill.body
        assert decode.body["sampling_params"] == BODY["sampling_params"]
        assert decode.body["stream"] is True
        record = await r.record("ids")
        assert record["decision"]["terms"]["prompt_tokens"] == 3
        assert record["decision"]["tokens_from"] == "ids"
        assert record["happened"]["split_verified"] is True


async def test_a_whole_answer_carries_nothing_internal() -> None:
    async with rig(policy="split") as r:
        answer = await r.post({**BODY, "kv_transfer_params": {"x": 1}}, path=PATH)
        assert answer.status == 200
        assert "kv_transfer_params" not in answer.json


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"features": {"mm_hashes": {}}}, "multimodal"),
        ({"content_parts": [{"type": "image_url"}]}, "multimodal"),
    ],
)
async def test_what_cannot_be_split_runs_locally_and_says_why(more: dict[str, Any], reason: str) -> None:
    async with rig(policy="split") as r:
        decision = (await r.post({**BODY, **more}, path=PATH)).decision
        assert (decision["choice"], decision["reason"]) == ("local", reason)


@pytest.mark.parametrize("odd", [None, 5, [], "x"])
async def test_odd_sampling_params_are_the_workers_business(odd: object) -> None:
    async with rig(policy="split") as r:
        await r.post({**BODY, "sampling_params": odd}, path=PATH)
        assert any(seen.body["sampling_params"] == odd for seen in r["d0"].seen)


@pytest.mark.parametrize("policy", ["local", "split"])
async def test_workers_without_the_path_are_an_openai_404(policy: str) -> None:
    stubs = StubWorker("p0", "prefill"), StubWorker("d0", "decode")
    for stub in stubs:
        stub.offers_ids = False
    async with rig(*stubs) as r:
        answer = await r.post(BODY, path=PATH, policy=policy)
        assert answer.status == 404
        assert (answer.json["error"]["type"], answer.json["error"]["code"]) == ("not_found_error", 404)


async def test_a_prefill_worker_without_the_path_costs_the_split_only() -> None:
    stubs = StubWorker("p0", "prefill"), StubWorker("d0", "decode")
    stubs[0].offers_ids = False
    async with rig(*stubs) as r:
        assert (await r.post(BODY, path=PATH, policy="split")).status == 200


async def test_a_broken_stream_ends_with_an_error_event() -> None:
    async with rig() as r:
        for name in ("p0", "d0"):
            r[name].behaviour["local"] = Behaviour("die", after=2)
        answer = await r.post({**BODY, "stream": True}, path=PATH)
        assert answer.events[-1]["error"]["code"] == 502


async def test_token_ids_are_required() -> None:
    async with rig() as r:
        answer = await r.post({"sampling_params": {}}, path=PATH)
        assert (answer.status, answer.json["error"]["param"]) == (400, "token_ids")
        assert json.loads(answer.body)["error"]["code"] == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, b'{"token_ids": [1], "sampling_params": %b}'),
        ("/v1/completions", b'{"prompt": "a", "vllm_xargs": %b}'),
        ("/v1/completions", b'{"prompt": "a", "stream_options": %b}'),
        ("/v1/completions", b'{"prompt": ["a", %b]}'),
        ("/v1/responses", b'{"input": %b}'),
    ],
)
async def test_what_can_be_read_can_be_read_again(path: str, body: bytes) -> None:
    """However deep it is nested: deeper in the router's own calls there is less room for the decoder."""
    async with rig(policy="split") as r:
        statuses = set()
        for depth in (300, *range(880, 1000), 100_000):
            answer = await r.post(body % (b'{"a":' * depth + b"1" + b"}" * depth), path=path)
            assert answer.status == 200 or "nested too deeply" in answer.error
            statuses.add(answer.status)
        assert statuses == {200, 400}
