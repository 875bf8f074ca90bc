"""Tool calls: what the template is told, what is read out of the answer, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_engine import report
from tests.worker.support import Client
from tollbridge.engine.base import EngineRequest, StepOutput
from tollbridge.worker.tools import CLOSE, OPEN, Said, ToolReader

WEATHER = '{"name": "weather", "arguments": {"city": "Oslo"}}'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
DEEP = '{"a":' * 5000
DEEP_CALL = OPEN + '{"name": "now", "arguments": ' + DEEP + CLOSE
ASKED = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
LIST_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "array"}}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def read(text: str, **options: bool) -> Said:
    return ToolReader(**options).feed(text, is_last=True)


def calls(said: Said) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in said.calls]


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ("plain", "plain", []),
        (OPEN + WEATHER + CLOSE, "", [("weather", {"city": "Oslo"})]),
        ("Let me see.\n" + OPEN + WEATHER + CLOSE, "Let me see.\n", [("weather", {"city": "Oslo"})]),
        (f"{OPEN}\n{WEATHER}\n{CLOSE}\n{OPEN}{WEATHER}{CLOSE}\n", "", [("weather", {"city": "Oslo"})] * 2),
        (OPEN + WEATHER, "", [("weather", {"city": "Oslo"})]),  # the closing tag is missing
        (OPEN + '{"name": "now"}' + CLOSE, "", [("now", {})]),
        (OPEN + '{"name": "now", "arguments": "{\\"a\\": 1}"}' + CLOSE, "", [("now", {"a": 1})]),
        (OPEN + "no JSON" + CLOSE, OPEN + "no JSON" + CLOSE, []),
        (OPEN + '{"arguments": {}}' + CLOSE + "x", OPEN + '{"arguments": {}}' + CLOSE + "x", []),
        (OPEN + '{"name": "cut', OPEN + '{"name": "cut', []),
        (DEEP_CALL, DEEP_CALL, []),
        ("a < b <tool", "a < b <tool", []),
        ("", "", []),
    ],
)
def test_reading(text: str, content: str, expected: list[tuple[str, Any]]) -> None:
    said = read(text)
    assert said.content == content
    assert calls(said) == expected


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ('\n{"name": "weather", "arguments": {"city": "Os', "", [("weather", '{"city": "Os')]),
        ('\n{"name": "a\\"b", "arguments": ', "", [('a"b', "")]),
        ('\n{"name": "weat', OPEN + '\n{"name": "weat', []),
    ],
)
def test_a_forced_call_is_told_as_far_as_it_got(text: str, content: str, expected: list[tuple[str, str]]) -> None:
    said = read(OPEN + text, is_forced=True)
    assert said.content == content
    assert [(call.function.name, call.function.arguments) for call in said.calls] == expected
    assert read(OPEN + text).calls == []


def test_of_several_calls_only_the_first_if_so_wished() -> None:
    assert len(read(OPEN + WEATHER + CLOSE + OPEN + WEATHER + CLOSE, only_one=True).calls) == 1


@given(st.lists(st.sampled_from([OPEN, CLOSE, WEATHER, "<tool", "_call>", "x", "\n", "{"]), max_size=8), st.data())
def test_pieces_say_what_the_whole_says(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole, reader, pieces = read(text), ToolReader(), []
    while text:
        size = data.draw(st.integers(1, len(text)))
        pieces.append(reader.feed(text[:size], is_last=size == len(text)))
        text = text[size:]
    assert "".join(piece.content for piece in pieces) == whole.content
    assert [call for piece in pieces for call in calls(piece)] == calls(whole)


def saying(text: str, *, step: int = 7) -> Any:
    def script(request: EngineRequest) -> Iterator[StepOutput]:
        for at in range(0, len(text), step):
            is_last = at + step >= len(text)
            yield StepOutput(
                request_id=request.request_id,
                token_ids=(1,),
                text=text[at : at + step],
                finish_reason="stop" if is_last else None,
                report=report(request, 1) if is_last else None,
            )

    return script


async def test_whole_answer(client: Client) -> None:
    client.engine.script = saying(OPEN + WEATHER + CLOSE)
    status, answer = await client.post("/v1/chat/completions", ASKED)
    assert status == 200
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert set(call) == {"id", "type", "function"}
    history = [*ASKED["messages"], choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "Rain"}]
    assert (await client.post("/v1/chat/completions", {**ASKED, "messages": history}))[0] == 200
    assert bytes(client.engine.submitted[-1].prompt_token_ids) == (
        b"<tool>weather<user>hi<assistant>weather{'city': 'Oslo'}<tool>Rain<assistant>"
    )


async def test_stream(client: Client) -> None:
    client.engine.script = saying("So: " + OPEN + WEATHER + CLOSE)
    chunks = await client.stream("/v1/chat/completions", ASKED)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta["content"] for delta in deltas) == "So: "
    ((call,),) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (call["index"], call["function"]["name"]) == (0, "weather")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop"), ("auto", "tool_calls")])
async def test_how_a_call_ends(client: Client, choice: object, finish: str) -> None:
    """OpenAI and vLLM: a tool that the request names is no news."""
    client.engine.script = saying(OPEN + WEATHER + CLOSE)
    asked = {**ASKED, "tool_choice": choice}
    whole = (await client.post("/v1/chat/completions", asked))[1]["choices"][0]
    last = (await client.stream("/v1/chat/completions", asked))[-1]["choices"][0]
    assert whole["finish_reason"] == last["finish_reason"] == finish
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize("more", [{"tool_choice": "none"}, {"tools": None}])
async def test_without_tools_text_stays_text(client: Client, more: dict[str, object]) -> None:
    client.engine.script = saying(OPEN + WEATHER + CLOSE)
    _, answer = await client.post("/v1/chat/completions", {**ASKED, **more})
    assert answer["choices"][0]["message"]["content"] == OPEN + WEATHER + CLOSE
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "colour": 1}}]}, "tools"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": NAMED, "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [LIST_TOOL]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "["}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": DEEP}}]}]},
            "messages",
        ),
    ],
)
async def test_refusals(client: Client, more: dict[str, object], param: str) -> None:
    status, answer = await client.post("/v1/chat/completions", {**ASKED, **more})
    assert (status, answer["error"]["param"]) == (400, param)
    assert client.engine.submitted == []
