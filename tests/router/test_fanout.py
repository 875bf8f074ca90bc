"""A list of prompts: one flow each, one answer."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from tests.support.router_rig import QUICK, Answer, Rig, happens, rig
from tests.support.stub_worker import Behaviour, StubWorker
from tollbridge.wire.params import parse

PROMPTS = ["first", "the second", "3rd"]
WHOLE: dict[str, Any] = {"prompt": PROMPTS, "max_tokens": 8}
STREAM = WHOLE | {"stream": True}


@asynccontextmanager
async def parrots(**router: Any) -> AsyncIterator[Rig]:
    stubs = StubWorker("p0", "prefill"), StubWorker("d0", "decode")
    for stub in stubs:
        stub.parrot = True
    async with rig(*stubs, policy="split", **router) as r:
        yield r


def texts(answer: Answer) -> list[str]:
    """Return the text of each choice of a stream, by index."""
    pieces: dict[int, str] = defaultdict(str)
    for event in answer.events:
        if event != "[DONE]":
            for choice in event["choices"]:
                pieces[choice["index"]] += choice["text"]
    return [pieces[index] for index in sorted(pieces)]


async def test_whole_answer() -> None:
    async with parrots() as r:
        answer = await r.post(WHOLE, x_request_id="list")
        assert answer.status == 200
        assert [(choice["index"], choice["text"]) for choice in answer.json["choices"]] == list(enumerate(PROMPTS))
        assert answer.json["usage"] == {"prompt_tokens": 300, "completion_tokens": 12, "total_tokens": 312}
        assert "kv_transfer_params" not in answer.json
        assert (answer.decision["choice"], answer.decision["prompts"]) == ("split", 3)
        assert answer.headers["x-request-id"] == "list"


async def test_each_prompt_has_a_transfer_and_a_record_of_its_own() -> None:
    async with parrots() as r:
        await r.post(WHOLE, x_request_id="list")
        legs = [parse(seen.body["kv_transfer_params"]) for seen in r["d0"].seen]
        assert len({leg.transfer_id for leg in legs if leg is not None}) == 3
        assert sorted(seen.body["prompt"] for seen in r["p0"].seen) == sorted(PROMPTS)
        for index in range(3):
            record = await r.record(f"list-{index}")
            assert record["decision"]["choice"] == "split"
            assert record["happened"]["split_verified"] is True
        assert await r.metric("split_verified_total") == 3


async def test_stream() -> None:
    async with parrots() as r:
        answer = await r.post(STREAM)
        assert texts(answer) == PROMPTS
        assert answer.events[-1] == "[DONE]"
        assert answer.events.count("[DONE]") == 1
        assert len({event["id"] for event in answer.events[:-1]}) == 1
        assert b"usage" not in answer.body


async def test_usage_of_a_stream_is_the_sum_and_comes_once() -> None:
    async with parrots() as r:
        answer = await r.post(STREAM | {"stream_options": {"include_usage": True}})
        with_usage = [event for event in answer.events[:-1] if event.get("usage")]
        assert with_usage == [answer.events[-2]]
        assert with_usage[0]["usage"]["prompt_tokens"] == 300
        assert with_usage[0]["choices"] == []


async def test_several_choices_are_numbered_on() -> None:
    async with parrots() as r:
        answer = await r.post(WHOLE | {"n": 2})
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 2, 4]  # a stub gives one of the two


async def test_lists_of_token_ids() -> None:
    async with rig(policy="split") as r:
        answer = await r.post(WHOLE | {"prompt": [[1, 2], [3]]})
        assert len(answer.json["choices"]) == 2
        assert sorted(seen.body["prompt"] for seen in r["d0"].seen) == [[1, 2], [3]]


async def test_a_local_policy_leaves_the_list_whole() -> None:
    async with rig(policy="local") as r:
        answer = await r.post(WHOLE)
        assert "prompts" not in answer.decision
        [seen] = r["p0"].seen + r["d0"].seen
        assert seen.body["prompt"] == PROMPTS


@pytest.mark.parametrize("body", [WHOLE, STREAM])
async def test_one_odd_prompt_fails_the_list(body: dict[str, Any]) -> None:
    """With nothing sent yet the client gets the worker's own refusal."""
    async with parrots() as r:
        r["d0"].refuses = r["p0"].refuses = PROMPTS[1]
        r["d0"].behaviour["decode"] = Behaviour(hold=(gate := asyncio.Event()))
        request = asyncio.create_task(r.post(body))
        await happens(r["p0"].arrived["prefill"])
        r["d0"].behaviour["local"] = Behaviour()
        answer = await request
        gate.set()
        assert answer.status == 400
        assert answer.error == "this prompt is odd"


async def test_a_prompt_that_fails_under_way_ends_the_stream_by_an_error_event() -> None:
    async with parrots() as r:
        r["p0"].names_ids = r["d0"].names_ids = False  # so that nobody can continue it
        r["d0"].behaviour["decode"] = Behaviour("die", after=2)
        answer = await r.post(STREAM)
        assert answer.status == 200
        assert "error" in answer.events[-1]
        assert b"[DONE]" not in answer.body


async def test_nobody_ready() -> None:
    async with parrots() as r:
        for stub in r.workers.values():
            await stub.stop()
            await r.until_ready(stub.name, False)
        assert (await r.post(WHOLE)).status == 503


async def test_every_prompt_waits_for_a_place_and_the_list_holds_none() -> None:
    async with parrots(max_concurrent=1) as r:
        answers = await asyncio.gather(r.post(WHOLE), r.post(STREAM))
        assert [choice["text"] for choice in answers[0].json["choices"]] == PROMPTS
        assert texts(answers[1]) == PROMPTS


async def test_a_list_does_not_fill_the_queue_by_itself() -> None:
    async with parrots(max_concurrent=1, max_queue=0) as r:
        assert (await r.post(WHOLE)).status == 200


async def test_a_client_that_leaves_takes_all_prompts_with_it() -> None:
    async with parrots() as r:
        r["d0"].behaviour["decode"] = Behaviour("stall", after=1)
        async with r.open(STREAM):
            await happens(r["d0"].arrived["decode"])
        await happens(r["d0"].departed["decode"])
        await r.until("/fleet", lambda fleet: fleet["in_flight"] == 0)


async def test_too_many_prompts() -> None:
    limits = msgspec.structs.replace(QUICK, max_prompts=2)
    async with rig(policy="split", limits=limits) as r:
        answer = await r.post(WHOLE)
        assert answer.status == 400
        assert "3 prompts" in answer.error


async def test_prompts_take_turns() -> None:
    limits = msgspec.structs.replace(QUICK, max_prompts_at_once=1)
    async with rig(policy="split", limits=limits) as r:
        answer = await r.post(WHOLE | {"prompt": [str(index) for index in range(7)]})
        assert [seen.body["prompt"] for seen in r["d0"].seen] == [str(index) for index in range(7)]
        assert len(answer.json["choices"]) == 7
