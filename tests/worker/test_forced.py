"""Calls that must come: what a model without any sense writes under the grammar is a call within the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from tests.engine.test_build import collect, start
from tests.worker.support import Client
from tollbridge.config.cluster import EngineConfig
from tollbridge.engine.base import EngineRequest, SamplingParams, Structure
from tollbridge.engine.core import EmbeddedEngine
from tollbridge.errors import RequestError
from tollbridge.wire.openai import ChatCompletionRequest
from tollbridge.worker.forced import maybe_calls
from tollbridge.worker.tools import maybe_reader

MESSAGES = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/place"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["Oslo", 'the "Øst"']}},
}
ODD = 'a"b\\c::=%json {'


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", CITY), tool(ODD, {"$defs": {"place": {"const": 1}}, "properties": {}} | {"maxProperties": 0})]
TOOLS.append(tool("now"))


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path) -> Iterator[EmbeddedEngine]:
    engine = start(tiny_model_dir, EngineConfig(kv_cache_mib=8, threads=1))
    yield engine
    engine.shutdown()


def asked(choice: object, tools: list[dict[str, Any]] = TOOLS, **more: object) -> ChatCompletionRequest:
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, **more}
    return msgspec.convert(body, ChatCompletionRequest)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(engine: EmbeddedEngine, request: ChatCompletionRequest, **more: Any) -> tuple[list[tuple[str, Any]], str]:
    """Return the calls and how the answer ended; it has no other text."""
    outputs: SimpleQueue[Any] = SimpleQueue()
    sampling = SamplingParams(max_tokens=more.pop("max_tokens", 400), structure=maybe_calls(request), **more)
    engine.submit(
        EngineRequest(request_id=f"r{id(outputs)}", prompt_token_ids=(5, 6, 7), sampling=sampling, sink=outputs.put)
    )
    _, text, last = collect(outputs)
    reader = maybe_reader(request)
    assert reader is not None
    said = reader.feed(text, is_last=True)
    assert said.content == ""
    return [(call.function.name, call.function.arguments) for call in said.calls], str(last.finish_reason)


@pytest.mark.parametrize("seed", range(5))
def test_required(engine: EmbeddedEngine, seed: int) -> None:
    calls, finish = called(engine, asked("required", parallel_tool_calls=False), seed=seed, temperature=1.5)
    ((name, arguments),) = calls
    check(name, json.loads(arguments))
    assert finish == "stop"


def check(name: str, arguments: Any) -> None:
    if name != "weather":
        assert (name, arguments) in [(ODD, {}), ("now", {})]
        return
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Oslo", 'the "Øst"')
    assert 1 <= arguments["days"] <= 9


def test_required_may_be_several(engine: EmbeddedEngine) -> None:
    calls, finish = called(engine, asked("required", [tool("now")]), seed=1, ignore_eos=False, max_tokens=200)
    assert {name for name, _ in calls} == {"now"}
    assert finish in ("stop", "length")
    assert " call)*" in _structure(asked("required")).text
    assert " call)*" not in _structure(asked("required", parallel_tool_calls=False)).text


@pytest.mark.parametrize("name", ["weather", ODD, "now"])
def test_named(engine: EmbeddedEngine, name: str) -> None:
    ((told, arguments),), finish = called(engine, asked(named(name)), seed=3)
    assert (told, finish) == (name, "stop")
    check(told, json.loads(arguments))


def test_a_call_that_max_tokens_cuts(engine: EmbeddedEngine) -> None:
    whole, _ = called(engine, asked(named("weather")), seed=3)
    cuts = [called(engine, asked(named("weather")), seed=3, max_tokens=number)[0] for number in (60, 62, 64)]
    for calls in cuts:
        ((name, arguments),) = calls
        assert name == "weather"
        assert whole[0][1].startswith(arguments)


def test_nothing_is_forced_otherwise() -> None:
    for choice in (None, "auto", "none"):
        assert maybe_calls(asked(choice)) is None


def test_parameters_that_are_no_object() -> None:
    with pytest.raises(RequestError, match='tool "list" must have the type "object"'):
        maybe_calls(asked("required", [tool("list", {"type": "array"})]))
    assert maybe_calls(asked(named("now"), [tool("list", {"type": "array"}), tool("now")])) is not None


def test_a_schema_that_makes_no_sense(engine: EmbeddedEngine) -> None:
    for parameters in ({"$ref": "#/nowhere"}, {"properties": 1}, {"type": "object", "properties": {"a": {"type": 1}}}):
        with pytest.raises(RequestError, match="calls structure cannot be used"):
            engine.check_structure(_structure(asked("required", [tool("x", parameters)])))


async def test_the_engine_is_told(client: Client) -> None:
    """Through the door; a schema that the engine refuses is the fault of `tools`."""
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    assert (await client.post("/v1/chat/completions", body))[0] == 200
    assert client.engine.submitted[-1].sampling.structure == maybe_calls(asked("required"))


def _structure(request: ChatCompletionRequest) -> Structure:
    found = maybe_calls(request)
    assert found is not None
    return found
