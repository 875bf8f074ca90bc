"""/inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_engine import MAX_MODEL_LEN
from tests.worker.support import Client, params

PATH = "/inference/v1/generate"
BODY: dict[str, Any] = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3}}


async def test_whole_answer(client: Client) -> None:
    status, answer = await client.post(PATH, {**BODY, "return_token_ids": True}, **{"x-request-id": "mine"})
    assert status == 200
    assert answer["request_id"] == "generate-tokens-mine"
    (choice,) = answer["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")
    assert answer["prompt_token_ids"] == [1, 2, 3]
    assert answer["usage"]["total_tokens"] == 6


async def test_stream(client: Client) -> None:
    chunks = await client.stream(PATH, {**BODY, "return_token_ids": True, "stream_options": {"include_usage": True}})
    *tokens, usage = chunks
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in tokens] == [1, 1, 1]
    assert [chunk.get("prompt_token_ids") for chunk in tokens] == [[1, 2, 3], None, None]
    assert [chunk["choices"][0]["finish_reason"] for chunk in tokens] == [None, None, "length"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)


@pytest.mark.parametrize("sampling", [{}, {"max_tokens": None}, {"max_tokens": 10_000}])
async def test_an_answer_may_fill_the_context(client: Client, sampling: dict[str, object]) -> None:
    await client.post(PATH, {**BODY, "sampling_params": sampling})
    assert client.engine.submitted[0].sampling.max_tokens == MAX_MODEL_LEN - 3


async def test_a_leg_has_a_role(client: Client) -> None:
    body = {**BODY, "sampling_params": {"max_tokens": 1}, "kv_transfer_params": params("prefill")}
    status, answer = await client.post(PATH, body)
    assert status == 200
    assert answer["kv_transfer_params"]["tollbridge"]["role"] == "prefill"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": [256]}, "token_ids"),
        ({"token_ids": [1] * 200}, "prompt"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": [1]}, None),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_token": 1}}, "max_token"),
        ({"sampling_params": {"echo": True}}, "echo"),
        ({"sampling_params": {"stream": True}}, "stream"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"content_parts": [{}]}, "content_parts"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_refusals(client: Client, more: dict[str, object], param: str | None) -> None:
    status, answer = await client.post(PATH, {**BODY, **more})
    assert (status, answer["error"]["param"]) == (400, param)
    assert client.engine.submitted == []


async def test_unknown_model(client: Client) -> None:
    status, answer = await client.post(PATH, {**BODY, "model": "nobody"})
    assert (status, answer["error"]["param"]) == (404, "model")
