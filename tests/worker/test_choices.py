"""Several choices and prompts in one request, echo, and log probabilities: the shapes are vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine, letters
from tests.worker.support import Client, eventually, params, serving
from tollbridge.engine.base import EngineRequest, StepOutput, TokenLogprobs
from tollbridge.wire.params import Role

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def scored(token_id: int) -> TokenLogprobs:
    """The token is the second likeliest, behind "z"."""
    return TokenLogprobs((token_id, ord("z"), token_id), (-2.0, -1.0, -2.0), rank=2)


def letters_with_logprobs(request: EngineRequest) -> Iterator[StepOutput]:
    prompt = (
        [None, *map(scored, request.prompt_token_ids[1:])] if request.sampling.prompt_logprobs is not None else None
    )
    for index, output in enumerate(letters(request)):
        logprobs = tuple(map(scored, output.token_ids)) if request.sampling.logprobs is not None else ()
        fields = {name: getattr(output, name) for name in output.__dataclass_fields__}
        yield StepOutput(**fields | {"logprobs": logprobs, "prompt_logprobs": None if index else prompt})


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    engine = FakeEngine(script=letters_with_logprobs)
    try:
        async with serving(engine) as client:
            yield client
    finally:
        engine.shutdown()


def said(request: EngineRequest) -> str:
    return "".join(output.text for output in letters(request))


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


async def test_what_many_choices_share_is_made_once(client: Client) -> None:
    await client.complete(prompt=["ab", "cde"], n=3, bad_words=["xy"], logit_bias={"3": 1}, seed=5)
    params = [request.sampling for request in client.engine.submitted]
    assert len(params) == 6
    assert len({id(each.bad_words) for each in params}) == len({id(each.logit_bias) for each in params}) == 1
    assert sorted(each.seed for each in params) == [5, 5, 6, 6, 7, 7]


@pytest.mark.parametrize("prompt", [["ab", "cde"], [[97, 98], [99, 100, 101]]])
async def test_choices_are_numbered_prompt_by_prompt(client: Client, prompt: object) -> None:
    answer = await client.complete(prompt=prompt, n=2, seed=7)
    by_prompt = {request.prompt_token_ids: said(request) for request in client.engine.submitted}
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    want = [by_prompt[97, 98]] * 2 + [by_prompt[99, 100, 101]] * 2
    assert [choice["text"] for choice in answer["choices"]] == want
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 16)
    seeds = sorted((request.prompt_token_ids, request.sampling.seed) for request in client.engine.submitted)
    assert [seed for _, seed in seeds] == [7, 8, 7, 8]


async def test_a_stream_of_several_choices(client: Client) -> None:
    body = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 3, "stream_options": {"include_usage": True}}
    *chunks, usage = await client.stream("/v1/completions", body)
    whole = await client.complete(prompt=["ab", "cde"], n=2, max_tokens=3)
    assert texts(chunks) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert sorted(c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]) == [0, 1, 2, 3]
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (5, 12)


async def test_followers_start_when_the_first_choice_has_its_token(client: Client) -> None:
    client.engine.hold()
    status, answer = None, None

    async def ask() -> None:
        nonlocal status, answer
        status, answer = await client.post("/v1/completions", {"prompt": "ab", "n": 3, "max_tokens": 2})

    task = asyncio.create_task(ask())
    await eventually(lambda: client.engine.submitted)
    assert len(client.engine.submitted) == 1
    client.engine.release()
    await task
    assert status == 200
    assert len(client.engine.submitted) == 3
    assert len(answer["choices"]) == 3


async def test_one_failure_fails_the_request_and_ends_the_others(client: Client) -> None:
    def script(request: EngineRequest) -> Iterator[StepOutput]:
        if request.prompt_token_ids == (98,):
            yield StepOutput(request_id=request.request_id, finish_reason="error", error="It broke.")
        while request.prompt_token_ids == (97,):
            yield StepOutput(request_id=request.request_id, token_ids=(97,), text="a")
        yield from letters(request)

    client.engine.script = script
    status, answer = await client.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 50})
    assert (status, answer["error"]["message"]) == (500, "It broke.")
    assert len(client.engine.aborted) == 1
    await client.complete(prompt=["c", "d"])


async def test_chat_choices(client: Client) -> None:
    _, answer = await client.post("/v1/chat/completions", {**CHAT, "n": 2})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    chunks = await client.stream("/v1/chat/completions", {**CHAT, "n": 2})
    roles = [c["index"] for chunk in chunks for c in chunk["choices"] if c["delta"].get("role")]
    assert sorted(roles) == [0, 1]


async def test_echo(client: Client) -> None:
    plain = await client.complete(prompt="ab")
    whole = await client.complete(prompt="ab", echo=True)
    assert whole["choices"][0]["text"] == "ab" + plain["choices"][0]["text"]
    assert whole["usage"] == plain["usage"]
    assert texts(await client.stream("/v1/completions", {"prompt": "ab", "max_tokens": 4, "echo": True})) == {
        0: whole["choices"][0]["text"]
    }
    by_ids = await client.complete(prompt=[97, 98], echo=True)
    assert by_ids["choices"][0]["text"] == whole["choices"][0]["text"]
    with_ids = await client.complete(prompt="ab", echo=True, return_token_ids=True)
    assert with_ids["choices"][0]["text"] == plain["choices"][0]["text"]


async def test_echo_of_nothing_but_the_prompt(client: Client) -> None:
    answer = await client.complete(prompt="abc", echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -2.0]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -2.0, "z": -1.0}, {"c": -2.0, "z": -1.0}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


async def test_logprobs_of_a_completion(client: Client) -> None:
    answer = await client.complete(prompt="ab", logprobs=0)
    (choice,) = answer["choices"]
    text = choice["text"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2, 3],
        "token_logprobs": [-2.0] * 4,
        "tokens": list(text),
        "top_logprobs": [{token: -2.0} for token in text],
    }
    chunks = await client.stream("/v1/completions", {"prompt": "ab", "max_tokens": 4, "logprobs": 0, "echo": True})
    joined: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined.setdefault(name, []).extend(values)
    whole = await client.complete(prompt="ab", logprobs=0, echo=True)
    assert joined == whole["choices"][0]["logprobs"]
    assert joined["text_offset"] == list(range(6))


async def test_logprobs_of_a_chat(client: Client) -> None:
    _, answer = await client.post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
    (choice,) = answer["choices"]
    letter = choice["message"]["content"][0]
    first = {"token": letter, "logprob": -2.0, "bytes": [ord(letter)]}
    second = {"token": "z", "logprob": -1.0, "bytes": [ord("z")]}
    assert choice["logprobs"]["content"][0] == {**first, "top_logprobs": [first, second]}
    chunks = await client.stream("/v1/chat/completions", {**CHAT, "logprobs": True})
    content = [one for chunk in chunks for one in chunk["choices"][0]["logprobs"]["content"]]
    assert [one["token"] for one in content] == list(choice["message"]["content"])
    assert content[0]["top_logprobs"] == []


async def test_prompt_logprobs(client: Client) -> None:
    answer = await client.complete(prompt="ab", prompt_logprobs=1)
    want = [
        None,
        {
            "98": {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
            "122": {"logprob": -1.0, "rank": 1, "decoded_token": "z"},
        },
    ]
    assert answer["choices"][0]["prompt_logprobs"][0] is None
    assert answer["choices"][0]["prompt_logprobs"][1]["122"] == want[1]["122"]  # type: ignore[index]
    assert answer["choices"][0]["logprobs"] is None
    _, chat = await client.post("/v1/chat/completions", {**CHAT, "prompt_logprobs": 0})
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_tokens_as_ids(client: Client) -> None:
    answer = await client.complete(prompt="ab", logprobs=0, return_tokens_as_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{ord(letter)}" for letter in choice["text"]]


async def test_the_report_is_that_of_the_first_choice(client: Client) -> None:
    body = {"prompt": "ab", "n": 2, "kv_transfer_params": params("decode")}
    answer = await client.complete(**body)
    assert answer["kv_transfer_params"]["tollbridge"]["role"] == "decode"
    chunks = await client.stream("/v1/completions", {**body, "max_tokens": 3})
    assert [c["choices"][0]["index"] for c in chunks if "kv_transfer_params" in c] == [0]
    transfers = [request.transfer is not None for request in client.engine.submitted]
    assert transfers == [True, False, True, False]


@pytest.mark.parametrize(
    ("role", "body", "word"),
    [
        ("decode", {"prompt": ["a", "b"]}, "one prompt"),
        ("prefill", {"prompt": "a", "n": 2, "max_tokens": 1}, "n 1"),
    ],
)
async def test_what_a_leg_cannot_have(client: Client, role: Role, body: dict[str, Any], word: str) -> None:
    signed = params(role)  # now: they expire
    status, answer = await client.post("/v1/completions", body | {"kv_transfer_params": signed})
    assert status == 400
    assert word in answer["error"]["message"]


async def test_every_parameter_reaches_the_engine(client: Client) -> None:
    await client.complete(
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"3": 250, "4": -1.5},
        min_tokens=2,
        bad_words=["ab"],
        allowed_token_ids=[1, 2],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        priority=-3,
        continued_tokens=1,
        structured_outputs={"choice": ["x", "y"]},
    )
    (request,) = client.engine.submitted
    sampling = request.sampling
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 1, -1)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.5, 2)
    assert sampling.logit_bias == ((3, 100.0), (4, -1.5))
    assert sampling.bad_words == ((97, 98),)
    assert (sampling.allowed_token_ids, sampling.include_stop, sampling.skip_special_tokens) == ((1, 2), True, False)
    assert (request.priority, request.num_continued_tokens) == (-3, 1)
    assert (sampling.structure.kind, sampling.structure.text) == ("choice", '["x","y"]')


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True}}, "json"),
    ],
)
async def test_response_formats(client: Client, wanted: object, kind: str | None) -> None:
    status, _ = await client.post("/v1/chat/completions", {**CHAT, "response_format": wanted})
    assert status == 200
    structure = client.engine.submitted[0].sampling.structure
    assert (structure.kind if structure else None) == kind
