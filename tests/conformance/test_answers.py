"""The same request gets the same answer from every server: text, tokens, finish, usage, and no field that vLLM has not.

All draws are greedy, so the embedded engine and vLLM, which run the same weights, must agree token for token.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.conformance.targets import Target
from tests.support.stack import get
from tollbridge.wire import sse

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
USER = {"role": "user", "content": "What is a toll?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
HISTORY = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
]
HALF = "\ufffd"
LONG = [261 + index * 7 % 200 for index in range(150)]  # more than a block of vLLM: a split has something to move

TEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "default length": {"max_tokens": None},
    "ids": {"prompt": LONG},
    "a list of one": {"prompt": ["A toll"]},
    "ids in a list": {"prompt": [LONG[:20]]},
    "token ids": {"return_token_ids": True, "prompt": LONG},
    "a stop string": {"stop": "e", "max_tokens": 20},
    "stop strings": {"stop": ["zzz", " a"], "max_tokens": 20},
    "stop ids": {"stop_token_ids": list(range(3, 60)), "max_tokens": 20},
    "top_k 1": {"temperature": 1.0, "top_k": 1},
    "top_p": {"top_p": 0.5},
    "seed": {"seed": 7},
    "no special tokens": {"add_special_tokens": False},
    "ignore_eos": {"ignore_eos": True},
    "salt and user": {"cache_salt": "pepper", "user": "me"},
    "n 2": {"n": 2, "temperature": 1.0, "top_k": 1},
    "prompts": {"prompt": ["A toll", "A river"]},
    "prompts of ids": {"prompt": [LONG[:9], LONG[9:40]], "return_token_ids": True},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 2},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 1.0, "repetition_penalty": 1.2, "max_tokens": 12},
    "bias": {"logit_bias": {"300": 100}},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": list(range(3, 511))},
    "min_p": {"min_p": 0.9, "temperature": 1.0, "top_k": 1},
    "stop included": {"stop": "e", "include_stop_str_in_output": True, "max_tokens": 20},
    "allowed ids": {"allowed_token_ids": [300, 301, 302]},
    "a choice": {"structured_outputs": {"choice": ["toll", "river"]}, "max_tokens": 20},
    "nulls": {"stop": None, "seed": None, "top_p": None, "logprobs": None, "stream": None, "logit_bias": None},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    },
    "system": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "max_completion_tokens": {"max_completion_tokens": 2},
    "continued": {
        "messages": [USER, {"role": "assistant", "content": "A toll is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "no generation prompt": {
        "messages": [USER, {"role": "assistant", "content": "A toll is"}],
        "add_generation_prompt": False,
    },
    "template variables": {"chat_template_kwargs": {"mood": "dry"}},
    "token ids": {"return_token_ids": True},
    "tools": {"tools": [WEATHER]},
    "tools, none to be called": {"tools": [WEATHER], "tool_choice": "none"},
    "tool history": {"tools": [WEATHER], "tool_choice": "auto", "messages": HISTORY},
    "one call at most": {"tools": [WEATHER], "parallel_tool_calls": False},
    "text format": {"response_format": {"type": "text"}},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
}
TOKENS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompt ids": {"return_token_ids": True},
    "a stop": {"sampling_params": {"temperature": 0, "max_tokens": 20, "stop": ["e"]}},
    "too much": {"sampling_params": {"temperature": 0, "max_tokens": 5000, "stop_token_ids": list(range(3, 300))}},
    "no limit": {"sampling_params": {"temperature": 0, "stop_token_ids": list(range(3, 300))}},
    "neutral": {"sampling_params": {"temperature": 0, "max_tokens": 3, "detokenize": True, "prompt_logprobs": None}},
    "several": {"sampling_params": {"n": 2, "top_k": 1, "max_tokens": 3}},
    "logprobs": {"sampling_params": {"temperature": 0, "logprobs": 1, "max_tokens": 3}},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": "What is a toll?"},
    "messages": {"input": [USER], "instructions": "Be brief."},
    "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "What is a toll?"}]}]},
}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "tokenize": ("/tokenize", {"prompt": "Hello toll"}),
    "tokenize strings": ("/tokenize", {"prompt": "Hello toll", "return_token_strs": True}),
    "tokenize nothing": ("/tokenize", {"prompt": ""}),
    "tokenize a chat": ("/tokenize", {"messages": [USER]}),
    "tokenize a chat with tools": ("/tokenize", {"messages": HISTORY, "tools": [WEATHER]}),
    "tokenize an open chat": (
        "/tokenize",
        {"messages": [USER], "add_generation_prompt": False, "continue_final_message": True},
    ),
    "detokenize": ("/detokenize", {"tokens": LONG}),
    "detokenize nothing": ("/detokenize", {"tokens": []}),
}


@cache
def asked(target: Target, path: str, case: str) -> dict[str, Any]:
    """Return the answer of `target`, which is asked once."""
    answer = target.ask(path, body_of(path, case))
    assert answer.status == 200, answer.raw
    return answer.json


def body_of(path: str, case: str) -> dict[str, Any]:
    common = {"model": "MODEL", "max_tokens": 6, "temperature": 0}
    if path == TEXT:
        return {**common, "prompt": "A toll", **TEXTS[case]}
    if path == CHAT:
        return {**common, "messages": [USER], **CHATS[case]}
    if path == GENERATE:
        sampling = {"temperature": 0, "max_tokens": 6}
        return {"model": "MODEL", "token_ids": LONG, "sampling_params": sampling, **TOKENS[case]}
    return {"model": "MODEL", **PLAIN[case][1]}


STREAMED = {
    "plain", "ids", "token ids", "a stop string", "stop ids", "nulls", "max_completion_tokens", "continued", "tools",
    "tool history", "logprobs", "log probabilities",
}  # fmt: skip
CASES = [(TEXT, case) for case in TEXTS] + [(CHAT, case) for case in CHATS]


@pytest.mark.parametrize(("path", "case"), CASES)
def test_whole_answers(target: Target, reference: Target, path: str, case: str) -> None:
    answer, expected = asked(target, path, case), asked(reference, path, case)
    assert essence(answer) == essence(expected)
    assert_no_strange_fields(answer, expected)


@pytest.mark.parametrize(("path", "case"), [case for case in CASES if case[1] in STREAMED])
def test_streams_add_up_to_the_whole(target: Target, reference: Target, path: str, case: str) -> None:
    chunks = target.stream(path, {**body_of(path, case), "stream_options": {"include_usage": True}})
    expected = asked(reference, path, case)
    assert joined(chunks) == {**essence(expected), "object": chunks[0]["object"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk" if path == CHAT else "text_completion"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert all(chunk.get("usage") is None for chunk in chunks[:-1])


@pytest.mark.parametrize("case", TOKENS)
def test_token_ids(target: Target, reference: Target, case: str) -> None:
    answer, expected = asked(target, GENERATE, case), asked(reference, GENERATE, case)
    assert tokens_of(answer) == tokens_of(expected)
    assert_no_strange_fields(answer, expected)
    if case == "several":
        return  # vLLM 0.31 ends such a stream with an error event
    chunks = target.stream(GENERATE, {**body_of(GENERATE, case), "stream_options": {"include_usage": True}})
    ids: dict[int, list[int]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert ids == {choice["index"]: choice["token_ids"] for choice in expected["choices"]}
    assert chunks[-1]["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert len({chunk["request_id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_followed(target: Target, reference: Target, stream: bool) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["toll", "way"]}}}
    body = {"model": "MODEL", "messages": [USER], "temperature": 0, "max_tokens": 40, "response_format": schema}
    said = []
    for server in (target, reference):
        answer = (
            joined(server.stream(CHAT, {**body, "stream_options": {"include_usage": True}}))
            if stream
            else (essence(server.ask(CHAT, body).json))
        )
        said.append((answer["choices"][0]["said"], answer["choices"][0]["finish_reason"]))
    assert said[0] == said[1]
    assert said[0][0] in ('"toll"', '"way"')


CITY = {
    "type": "object",
    "properties": {"city": {"const": "Oslo"}},
    "required": ["city"],
    "additionalProperties": False,
}
OSLO = {"type": "function", "function": {"name": "go", "parameters": CITY, "strict": True}}
DEMANDS: dict[str, dict[str, Any]] = {
    "required": {"tools": [OSLO], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": [WEATHER, OSLO], "tool_choice": {"type": "function", "function": {"name": "go"}}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", DEMANDS)
def test_a_call_that_is_demanded(
    target: Target, reference: Target, taste: dict[str, int], case: str, *, stream: bool
) -> None:
    """The model has no sense at all: that it calls the tool, and with what, is the grammar's doing."""
    body = {"model": "MODEL", "messages": [USER], "temperature": 0, "max_tokens": 150, "logit_bias": taste}
    found = []
    for server in (target, reference):
        if stream:
            choices = [c for chunk in server.stream(CHAT, {**body, **DEMANDS[case]}) for c in chunk["choices"]]
            messages = [choice["delta"] for choice in choices]
        else:
            choices = server.ask(CHAT, {**body, **DEMANDS[case]}).json["choices"]
            messages = [choice["message"] for choice in choices]
        assert not any(message.get("content") for message in messages)
        functions = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
        name = "".join(function.get("name") or "" for function in functions)
        arguments = "".join(function.get("arguments") or "" for function in functions)
        found.append((name, json.loads(arguments), choices[-1]["finish_reason"]))
    assert found[0] == found[1] == ("go", {"city": "Oslo"}, "stop" if case == "named" else "tool_calls")


@pytest.mark.parametrize("case", RESPONSES)
def test_responses(target: Target, reference: Target, case: str) -> None:
    asked = {"model": "MODEL", "max_output_tokens": 6, "temperature": 0, **RESPONSES[case]}
    said = []
    for server in (target, reference):
        answer = server.ask("/v1/responses", asked).json
        (item,) = answer["output"]
        (part,) = item["content"]
        usage = [answer["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")]
        said.append((readable(part["text"]), answer["status"], answer["object"], answer["incomplete_details"], usage))
    assert said[0] == said[1]
    stream = target.ask("/v1/responses", {**asked, "stream": True})
    assert stream.headers.get_content_type() == "text/event-stream"
    events = [json.loads(event) for event in sse.Parser().feed(stream.raw) if event != b"[DONE]"]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert readable("".join(deltas)) == said[0][0]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event["type"].removeprefix("response.") for event in events))
    assert kinds[:-1] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
    ]  # fmt: skip


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_usage_of_streams(target: Target, path: str) -> None:
    case = "plain"
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in target.stream(path, body_of(path, case)))
    body = {**body_of(path, case), "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [chunk["usage"]["completion_tokens"] for chunk in target.stream(path, body)]
    assert counts == sorted(counts)
    assert counts[-1] == 6


@pytest.mark.parametrize("case", PLAIN)
def test_plain_answers(target: Target, reference: Target, case: str) -> None:
    path = PLAIN[case][0]
    assert asked(target, path, case) == asked(reference, path, case)


def test_models_version_health(target: Target) -> None:
    models = json.loads(get(target.url + "/v1/models"))
    assert models["object"] == "list"
    assert {"id", "object", "created", "owned_by"} <= models["data"][0].keys()
    assert target.model in [card["id"] for card in models["data"]]
    get(target.url + "/health")
    assert b"tollbridge" in get(target.url + "/metrics") or target.name == "vllm"


# --- what is compared


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what a client acts on: ids, times and the words of the model's name differ by right."""
    usage = counts_of(answer)
    choices = [choice_essence(choice, answer) for choice in answer["choices"]]
    return {"object": answer["object"], "choices": choices, "usage": usage}


def counts_of(answer: dict[str, Any]) -> dict[str, int]:
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


def tokens_of(answer: dict[str, Any]) -> dict[str, Any]:
    usage = counts_of(answer)
    choices = [(choice["index"], choice["token_ids"], choice["finish_reason"]) for choice in answer["choices"]]
    return {"choices": choices, "usage": usage, "prompt": answer.get("prompt_token_ids")}


def choice_essence(choice: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    return {
        "index": choice["index"],
        "said": readable(choice.get("text", message.get("content")) or ""),
        "role": message.get("role"),
        "calls": [call["function"] for call in message.get("tool_calls") or ()],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
        "logprobs": numbers(choice.get("logprobs")),
        "token_ids": choice.get("token_ids") or None,
        "prompt_token_ids": choice.get("prompt_token_ids") or answer.get("prompt_token_ids"),
    }


def numbers(logprobs: dict[str, Any] | None) -> list[float]:
    """Return the log probabilities of the tokens drawn, of a completion or a chat."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [round(each["logprob"], 2) for each in logprobs["content"]]
    return [round(value, 2) for value in logprobs["token_logprobs"]]


def readable(text: str) -> str:
    """Return `text` less what random bytes leave: detokenizers count halves of characters differently."""
    return text.replace(HALF, "")


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole answer that the chunks of one choice make."""
    deltas = [(chunk["choices"][0], chunk) for chunk in chunks if chunk["choices"]]
    parts = [choice_essence({**choice, "message": choice.get("delta")}, chunk) for choice, chunk in deltas]
    ids = [token for part in parts for token in part["token_ids"] or ()]
    whole = {
        **parts[-1],
        "said": readable("".join(part["said"] for part in parts)),
        "role": parts[0]["role"],
        "calls": [call for part in parts for call in part["calls"]],
        "token_ids": ids or None,
        "logprobs": [value for part in parts for value in part["logprobs"]],
        "prompt_token_ids": parts[0]["prompt_token_ids"],
    }
    usage = counts_of(chunks[-1])
    return {"object": chunks[0]["object"], "choices": [whole], "usage": usage}


def assert_no_strange_fields(ours: object, theirs: object, where: str = "answer") -> None:
    """Every field of `ours` is one of `theirs`; what is null there may be anything, and keys made of text, too."""
    if where.endswith("top_logprobs[]"):
        return
    if isinstance(ours, dict) and isinstance(theirs, dict):
        assert ours.keys() <= theirs.keys(), f"{where} has {sorted(ours.keys() - theirs.keys())}"
        for name in ours:
            assert_no_strange_fields(ours[name], theirs[name], f"{where}.{name}")
    if isinstance(ours, list) and isinstance(theirs, list):
        for mine, other in zip(ours, theirs, strict=False):
            assert_no_strange_fields(mine, other, f"{where}[]")
