"""What vLLM can do, through the router: each feature works split, or runs locally and says so (docs/vllm.md)."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from tests.vllm.conftest import BLOCK
from tests.vllm.pair import Pair, outcome, prompt, report, tokens
from tests.vllm.routed import routed
from tollbridge.wire import sse

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

COMMON: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
IDS = {"return_token_ids": True, "detokenize": False}
QUESTION = [{"role": "user", "content": "How long does a cart wait at the bridge, and what does it pay? " * 4}]


@dataclass
class Routed:
    """A router that splits everything, over the pair."""

    url: str
    session: aiohttp.ClientSession

    async def ask(self, body: dict[str, Any], *, path: str = "/v1/completions", local: bool = False) -> Asked:
        headers = {"x-tollbridge-policy": "local"} if local else {}
        async with self.session.post(self.url + path, json=COMMON | body, headers=headers) as answer:
            raw = await answer.read()
            decision = json.loads(answer.headers.get("x-tollbridge-decision", "{}"))
            return Asked(answer.status, raw, decision)

    async def both(self, body: dict[str, Any], *, path: str = "/v1/completions") -> tuple[Asked, Asked]:
        """Return the answers to a verified split and to the same request served locally, each from scratch."""
        split = await self.ask(body | {"cache_salt": "split"}, path=path)
        assert split.status == 200, split.raw
        assert (split.decision["choice"], split.decision.get("verified")) == ("split", True), split.decision
        return split, await self.ask(body | {"cache_salt": "local"}, path=path, local=True)

    async def happened(self, request_id: str) -> dict[str, Any]:
        async with self.session.get(f"{self.url}/decisions/{request_id}") as answer:
            return dict((await answer.json())["happened"])


@dataclass
class Asked:
    status: int
    raw: bytes
    decision: dict[str, Any]

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def choice(self) -> Any:
        return self.json["choices"][0]

    @property
    def chunks(self) -> list[Any]:
        return [json.loads(data) for data in sse.Parser().feed(self.raw) if data != b"[DONE]"]


@pytest.fixture
async def router(pair: Pair) -> AsyncIterator[Routed]:
    async with routed(pair) as (url, session):
        yield Routed(url, session)


class TestSeveral:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_list_of_prompts_is_one_split_each(self, pair: Pair, router: Routed, stream: bool) -> None:
        texts = [prompt(length, seed=700 + length + stream) for length in (200, 5, 2 * BLOCK + 3)]
        options = {"stream_options": {"include_usage": True}} if stream else {}
        asked = await router.ask({"prompt": texts, "stream": stream, **IDS, **options})
        assert asked.status == 200, asked.raw
        got: dict[int, list[int]] = defaultdict(list)
        answers = asked.chunks if stream else [asked.json]
        for answer in answers:
            for choice in answer["choices"]:
                got[choice["index"]] += choice["token_ids"] or []
        assert [got[index] for index in range(3)] == [await pair.local(text) for text in texts]
        assert answers[-1]["usage"]["prompt_tokens"] == sum(map(len, texts))
        base = asked.decision["id"].rpartition("-")[0]
        for index in range(3):
            assert (await router.happened(f"{base}-{index}"))["split_verified"] is True

    @pytest.mark.parametrize("stream", [False, True])
    async def test_several_choices_load_once(self, pair: Pair, router: Routed, stream: bool) -> None:
        text = prompt(2 * BLOCK + 9, seed=710 + stream)
        before = await pair.metric(pair.d, "vllm:tollbridge_transfers_total", side="receive")
        asked = await router.ask({"prompt": text, "n": 3, "temperature": 1, "top_k": 1, "stream": stream, **IDS})
        got: dict[int, list[int]] = defaultdict(list)
        for answer in asked.chunks if stream else [asked.json]:
            for choice in answer["choices"]:
                got[choice["index"]] += choice["token_ids"] or []
        assert list(got.values()) == [await pair.local(text)] * 3
        assert asked.decision["choice"] == "split"
        assert (await router.happened(asked.decision["id"]))["split_verified"] is True
        await pair.becomes(before + 1, pair.d, "vllm:tollbridge_transfers_total", side="receive")

    async def test_a_list_with_several_choices(self, pair: Pair, router: Routed) -> None:
        texts = [prompt(length, seed=720 + length) for length in (150, 260)]
        asked = await router.ask({"prompt": texts, "n": 2, "temperature": 1, "top_k": 1, **IDS})
        expected = [await pair.local(text) for text in texts for _ in range(2)]
        assert [choice["token_ids"] for choice in asked.json["choices"]] == expected
        assert [choice["index"] for choice in asked.json["choices"]] == [0, 1, 2, 3]


class TestSampling:
    """What concerns sampling is decode's alone."""

    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 1.0, "seed": 7},
            {"temperature": 1.0, "seed": 7, "top_p": 0.9, "presence_penalty": 1.0, "repetition_penalty": 1.2},
            {"logit_bias": {"17": 5.0}},
            {"min_tokens": 4, "ignore_eos": False},
            {"echo": True},
            {"bad_words": ["bridge"]},
        ],
    )
    async def test_options(self, router: Routed, options: dict[str, Any]) -> None:
        split, local = await router.both({"prompt": "The keeper of the bridge counts " * 12, **options})
        assert split.choice["text"] == local.choice["text"]
        assert split.choice["text"]

    async def test_logprobs(self, router: Routed) -> None:
        split, local = await router.both({"prompt": prompt(300, seed=730), "logprobs": 3})
        assert split.choice["logprobs"]["tokens"] == local.choice["logprobs"]["tokens"]
        one, two = (asked.choice["logprobs"]["token_logprobs"] for asked in (split, local))
        assert one == pytest.approx(two, abs=1e-3)

    async def test_stop_strings(self, router: Routed) -> None:
        body = {"prompt": prompt(300, seed=731), "max_tokens": 24}
        whole = (await router.ask(body, local=True)).choice["text"]
        split, local = await router.both(body | {"stop": [whole[8:11]]})
        assert split.choice["text"] == local.choice["text"]
        assert split.choice["finish_reason"] == "stop"

    async def test_prompt_logprobs_are_local_and_say_so(self, router: Routed) -> None:
        asked = await router.ask({"prompt": prompt(200, seed=732), "prompt_logprobs": 0})
        assert (asked.decision["choice"], asked.decision["reason"]) == ("local", "prompt_logprobs")
        assert len(asked.choice["prompt_logprobs"]) == 200


class TestStructure:
    async def test_json_schema(self, router: Routed) -> None:
        schema = {
            "type": "object", "additionalProperties": False, "required": ["open", "toll"],
            "properties": {"open": {"type": "boolean"}, "toll": {"enum": ["penny", "pound"]}},
        }  # fmt: skip
        shape = {"type": "json_schema", "json_schema": {"name": "bridge", "schema": schema}}
        split, local = await router.both(
            {"messages": QUESTION, "response_format": shape, "max_tokens": 60, "ignore_eos": False},
            path="/v1/chat/completions",
        )
        assert split.choice["message"]["content"] == local.choice["message"]["content"]
        assert json.loads(split.choice["message"]["content"]).keys() == {"open", "toll"}

    async def test_structured_outputs(self, router: Routed) -> None:
        body = {"prompt": prompt(150, seed=740), "structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}
        split, local = await router.both(body)
        assert split.choice["text"] == local.choice["text"]
        assert split.choice["text"] in ("yes", "no")

    @pytest.mark.parametrize("stream", [False, True])
    async def test_tools(self, router: Routed, stream: bool) -> None:
        parameters = {"type": "object", "required": ["cart"], "additionalProperties": False}
        parameters |= {"properties": {"cart": {"enum": ["light", "heavy"]}}}
        tool = {"type": "function", "function": {"name": "toll", "description": "A toll.", "parameters": parameters}}
        body = {"messages": QUESTION, "tools": [tool], "max_tokens": 80, "ignore_eos": False, "stream": stream}
        body["tool_choice"] = {"type": "function", "function": {"name": "toll"}}
        split = await router.ask(body | {"cache_salt": "split"}, path="/v1/chat/completions")
        local = await router.ask(body | {"cache_salt": "local"}, path="/v1/chat/completions", local=True)
        assert (await router.happened(split.decision["id"]))["split_verified"] is True
        assert calls_of(split, stream) == calls_of(local, stream)
        assert calls_of(split, stream)[0] == "toll"


def calls_of(asked: Asked, stream: bool) -> tuple[str, str]:
    """Return name and arguments of the one tool call."""
    answers = asked.chunks if stream else [asked.json]
    said = [choice["delta" if stream else "message"] for answer in answers for choice in answer["choices"]]
    functions = [call["function"] for each in said for call in each.get("tool_calls") or ()]
    return "".join(f.get("name") or "" for f in functions), "".join(f.get("arguments") or "" for f in functions)


class TestKeys:
    """KV computed from something else must never be taken: digest and cache keys."""

    async def test_an_adapter_is_local_and_says_so(self, pair: Pair, router: Routed) -> None:
        text = prompt(300, seed=750)
        base = await pair.local(text)
        asked = await router.ask({"model": "poet", "prompt": text, **IDS})
        assert (asked.decision["choice"], asked.decision["reason"]) == ("local", "lora_adapter")
        direct = await pair.complete(pair.d, text, 12, model="poet", cache_salt="fresh")
        assert asked.choice["token_ids"] == tokens(direct) != base
        again = await router.ask({"prompt": text, **IDS})  # on workers that hold KV of the adapter
        assert again.decision["choice"] == "split"
        assert again.choice["token_ids"] == base

    async def test_an_adapter_on_one_side_only(self, pair: Pair) -> None:
        """Not by way of the router: the connector itself declines."""
        text, key = prompt(300, seed=751), "ab" * 16
        prefill, decode = await asyncio.gather(
            pair.complete(pair.p, text, 1, pair.params("prefill", key)),
            pair.complete(pair.d, text, 12, pair.params("decode", key), model="poet"),
        )
        assert outcome(decode) == "declined"
        assert report(prefill)["role"] == "prefill"
        assert tokens(decode) == tokens(await pair.complete(pair.d, text, 12, model="poet", cache_salt="fresh"))

    async def test_a_salt_keeps_tenants_apart(self, pair: Pair, router: Routed) -> None:
        text = prompt(2 * BLOCK + 20, seed=752)
        for salt in ("one", "two"):
            asked = await router.ask({"prompt": text, "cache_salt": salt, **IDS})
            happened = await router.happened(asked.decision["id"])
            assert happened["split_verified"] is True
            assert happened["decode_report"]["loaded_tokens"] == len(text) - 1
            assert asked.choice["token_ids"] == await pair.local(text)


class TestPassedOn:
    async def test_images_are_local_and_say_so(self, router: Routed) -> None:
        """This model has no eyes: what counts is that nobody tries to split, and that vLLM's own refusal comes back."""
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
        asked = await router.ask({"messages": messages}, path="/v1/chat/completions")
        assert (asked.decision["choice"], asked.decision["reason"]) == ("local", "multimodal")
        assert asked.status == 400

    async def test_tokenize_is_untouched(self, pair: Pair, router: Routed) -> None:
        body = {"model": "tiny", "prompt": "The toll."}
        async with router.session.post(pair.d.url + "/tokenize", json=body) as answer:
            direct = await answer.json()
        assert (await router.ask(body, path="/tokenize")).json["tokens"] == direct["tokens"]
