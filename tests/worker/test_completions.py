"""Shapes of /v1/completions, whole and streamed."""

from __future__ import annotations

import json

import pytest

from tests.worker.support import Client


async def test_whole_answer(client: Client) -> None:
    answer = await client.complete(prompt=[1, 2, 3], max_tokens=4)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake"
    assert answer["choices"] == [
        {"index": 0, "text": "ghij", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert "kv_transfer_params" not in answer


async def test_stream_adds_up_to_the_whole(client: Client) -> None:
    whole = await client.complete(max_tokens=6)
    chunks = await client.stream("/v1/completions", {"prompt": "hello", "max_tokens": 6})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk and "kv_transfer_params" not in chunk for chunk in chunks)


async def test_usage_chunk_has_no_choices_and_comes_last(client: Client) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "stream_options": {"include_usage": True}}
    *rest, last = await client.stream("/v1/completions", body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert all("usage" not in chunk for chunk in rest)


async def test_continuous_usage_counts_up(client: Client) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "stream_options": {"continuous_usage_stats": True}}
    chunks = await client.stream("/v1/completions", body)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


async def test_token_ids_on_request(client: Client) -> None:
    whole = await client.complete(prompt=[1, 2, 3], max_tokens=2, return_token_ids=True)
    assert whole["choices"][0]["token_ids"] == [ord("g"), ord("h")]
    assert whole["choices"][0]["prompt_token_ids"] == [1, 2, 3]
    chunks = await client.stream("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2, "return_token_ids": True})
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[ord("g")], [ord("h")]]
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [[1, 2, 3], None]


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
async def test_one_prompt_in_any_of_its_forms(client: Client, prompt: object) -> None:
    await client.complete(prompt=prompt)
    assert client.engine.submitted[0].prompt_token_ids == (104, 105)


async def test_defaults_are_those_of_openai(client: Client) -> None:
    await client.post("/v1/completions", {"prompt": "hello"})
    sampling = client.engine.submitted[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1.0, 1.0, 0)
    await client.post("/v1/completions", {"prompt": [1] * 120})
    assert client.engine.submitted[1].sampling.max_tokens == 8  # what is left of the context


async def test_sampling_reaches_the_engine(client: Client) -> None:
    await client.complete(
        temperature=0, top_p=0.5, top_k=-1, seed=7, stop="zz", stop_token_ids=[3], ignore_eos=True, cache_salt="t1"
    )
    request = client.engine.submitted[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.5, 0, 7)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("zz",), (3,), True)
    assert request.cache_salt == "t1"


async def test_nulls_and_neutral_values_ask_for_nothing(client: Client) -> None:
    await client.complete(n=None, stream=None, stop=None, echo=False, logprobs=None, frequency_penalty=0, suffix=None)


async def test_request_id_is_the_callers(client: Client) -> None:
    for given, kept in (("abc-1", True), ("not\tharmless", False), ("x" * 200, False)):
        body = json.dumps({"prompt": "hello"})
        async with client.session.post(
            client.url + "/v1/completions", data=body, headers={"x-request-id": given}
        ) as response:
            answer = await response.json()
            assert (response.headers["x-request-id"] == given) is kept
            assert answer["id"] == "cmpl-" + response.headers["x-request-id"]


async def test_one_request_id_twice_at_once_is_two_requests(client: Client) -> None:
    for _ in range(2):
        await client.post("/v1/completions", {"prompt": "hello"}, **{"x-request-id": "same"})
    assert len({request.request_id for request in client.engine.submitted}) == 2
