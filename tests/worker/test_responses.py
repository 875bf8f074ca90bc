"""`/v1/responses`: what it means as a chat, its events, and what it refuses; tests/integration has the real client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_engine import letters, report
from tests.worker.support import Client
from tollbridge.engine.base import EngineRequest, StepOutput, Structure

PATH = "/v1/responses"
EARLIER = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}],
}


def prompt(client: Client) -> str:
    return bytes(client.engine.submitted[-1].prompt_token_ids).decode()


async def answered(client: Client, **body: object) -> dict[str, Any]:
    status, answer = await client.post(PATH, {"max_output_tokens": 4, **body})
    assert status == 200, answer
    return answer


async def events(client: Client, **body: object) -> list[dict[str, Any]]:
    """Return the events, having checked their framing and numbers."""
    data = json.dumps({"max_output_tokens": 4, "stream": True, **body})
    async with client.session.post(client.url + PATH, data=data) as response:
        raw = (await response.read()).decode()
        assert (response.status, response.content_type) == (200, "text/event-stream"), raw
    found = []
    for number, event in enumerate(raw.removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
    return found


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": "hi"}, "<user>hi"),
        ({"input": "hi", "instructions": "Be kind"}, "<system>Be kind<user>hi"),
        ({"input": [{"role": "user", "content": "a"}, EARLIER, {"role": "user", "content": "b"}]},
         "<user>a<assistant>yes<user>b"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, "<user>a"),
    ],
)  # fmt: skip
async def test_the_chat_that_it_means(client: Client, body: dict[str, Any], said: str) -> None:
    await answered(client, **body)
    assert prompt(client) == said + "<assistant>"


async def test_whole_answer(client: Client) -> None:
    answer = await answered(client, input="hi", temperature=0.5, user="me")
    (item,) = answer["output"]
    text = "".join(output.text for output in letters(client.engine.submitted[-1]))
    assert item["content"] == [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    assert (item["status"], answer["status"]) == ("incomplete", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["id"].startswith("resp_")
    assert (answer["temperature"], answer["top_p"], answer["store"], answer["user"]) == (0.5, 1, False, "me")
    num_tokens = len(client.engine.submitted[-1].prompt_token_ids)
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (num_tokens, 4)
    assert "kv_transfer_params" not in answer
    assert "kv_transfer_params" not in (await client.post(PATH, {"input": "a"}, **{"x-tollbridge-report": "1"}))[1]


async def test_events(client: Client) -> None:
    found = await events(client, input="hi")
    deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    assert len(deltas) == 4
    ends = [event for event in found if not event["type"].endswith("delta")]
    assert [event["type"].removeprefix("response.") for event in ends] == [
        "created", "in_progress", "output_item.added", "content_part.added",
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    begun, last = ends[0]["response"], ends[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert ends[4]["text"] == ends[5]["part"]["text"] == "".join(deltas)
    assert last["output"] == [ends[6]["item"]]
    assert last["output"][0]["content"][0]["text"] == "".join(deltas)
    assert last["usage"]["output_tokens"] == 4
    assert {event["item_id"] for event in found if "item_id" in event} == {last["output"][0]["id"]}


async def test_an_answer_that_ends_by_itself(client: Client) -> None:
    def script(request: EngineRequest) -> Iterator[StepOutput]:
        yield StepOutput(
            request_id=request.request_id, token_ids=(1,), text="", finish_reason="stop", report=report(request, 1)
        )

    client.engine.script = script
    answer = await answered(client, input="hi")
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    found = await events(client, input="hi")
    assert found[-1]["type"] == "response.completed"
    assert all(event["type"] != "response.output_text.delta" for event in found)


async def test_a_failure_within_the_stream(client: Client) -> None:
    def script(request: EngineRequest) -> Iterator[StepOutput]:
        yield StepOutput(request_id=request.request_id, token_ids=(1,), text="a")
        yield StepOutput(request_id=request.request_id, finish_reason="error", error="The engine tripped.")

    client.engine.script = script
    last = (await events(client, input="hi"))[-1]
    assert (last["type"], last["message"]) == ("error", "The engine tripped.")
    assert last["error"]["message"] == last["message"]


async def test_a_format_is_a_structure(client: Client) -> None:
    schema = {"type": "object"}
    await answered(client, input="a", text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    assert client.engine.submitted[-1].sampling.structure == Structure("json", '{"type":"object"}')
    answer = await answered(client, input="a", text={"format": {"type": "json_object"}})
    assert client.engine.submitted[-1].sampling.structure == Structure("json_object")
    assert answer["text"] == {"format": {"type": "json_object"}}


async def test_what_asks_for_nothing_is_let_through(client: Client) -> None:
    nothing = {"store": False, "previous_response_id": None, "tools": [], "tool_choice": "auto", "include": [],
               "background": False, "truncation": "disabled", "parallel_tool_calls": True, "metadata": {},
               "service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "y"}  # fmt: skip
    await answered(client, input="a", **nothing)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input"),
        ({"input": "a", "store": True}, "store"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "reasoning": {"effort": "low"}}, "reasoning"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "a" * 1000}, "input"),
        ({"input": "a", "temperature": 3}, "temperature"),
        ({"input": "a", "top_k": -7}, "top_k"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"input": "a", "text": {"verbosity": "low"}}, "text"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": "a", "colour": 1}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"content": "a"}]}, "input"),
        ({"input": [{"role": "martian", "content": "a"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
        ({"input": [{"type": 7}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": [], "text": "a"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": {}, "text": "a"}]}]}, "input"),
        ({"input": "a", "model": "nobody"}, "model"),
    ],
)
async def test_refusals(client: Client, body: dict[str, Any], param: str) -> None:
    status, answer = await client.post(PATH, body)
    assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param), answer
    assert client.engine.submitted == []
    assert "messages" not in answer["error"]["message"]
    assert "only input" not in answer["error"]["message"], "a word of ours, not a name"


async def test_a_message_is_numbered_as_it_was_sent(client: Client) -> None:
    _, answer = await client.post(PATH, {"instructions": "x", "input": [EARLIER, {"role": "user"}]})
    assert answer["error"]["message"].startswith("input[1] needs")
