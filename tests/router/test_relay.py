"""Relaying over real sockets: odd cuts, real clients."""

from __future__ import annotations

import random

import openai
import pytest

from tests.support.router_rig import rig
from tests.support.stub_worker import Behaviour
from tollbridge.clock import ManualClock
from tollbridge.router.relay import Pipe
from tollbridge.router.stream import EventFilter

STREAM = {"prompt": "Hello", "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
MESSAGES = [{"role": "user", "content": "Hello"}]


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def at_once(data: bytes) -> list[bytes]:
    return [data]


def anywhere(data: bytes) -> list[bytes]:
    rng = random.Random(5)
    cuts = sorted(rng.sample(range(1, len(data)), 12))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("cut", [bytewise, at_once, anywhere])
@pytest.mark.parametrize("policy", ["local", "split"])
async def test_streams_cut_in_odd_places(cut: object, policy: str) -> None:
    async with rig() as r:
        r["d0"].cut = cut  # type: ignore[assignment]
        answer = await r.post(STREAM, policy=policy, x_request_id="odd")
        assert answer.text == "Hello world"
        assert answer.events[-1] == "[DONE]"
        assert answer.events[-2]["usage"]["completion_tokens"] == 4
        assert b"kv_transfer_params" not in answer.body
        assert (await r.record("odd"))["happened"]["decode_report"]["generated_tokens"] == 4


async def test_tokens_of_a_stock_server_are_counted_from_usage() -> None:
    async with rig() as r:
        r["d0"].stock = True
        await r.post(STREAM, x_request_id="stock")
        happened = (await r.record("stock"))["happened"]
        assert (happened["prompt_tokens"], happened["completion_tokens"]) == (100, 4)


@pytest.mark.parametrize("policy", ["local", "split"])
async def test_openai_client(policy: str) -> None:
    async with (
        rig() as r,
        openai.AsyncOpenAI(
            base_url=f"{r.url}/v1", api_key="none", max_retries=0, default_headers={"x-tollbridge-policy": policy}
        ) as client,
    ):
        ask = {"model": "stub-model", "messages": MESSAGES, "max_tokens": 8}
        whole = await client.chat.completions.create(**ask)  # type: ignore[call-overload]
        assert whole.choices[0].message.content == "Hello world"
        assert whole.usage.completion_tokens == 4
        stream = await client.chat.completions.create(**ask, stream=True)  # type: ignore[call-overload]
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "Hello world"
        text = await client.completions.create(model="stub-model", prompt="Hello", stream=True)
        assert "".join([c.choices[0].text async for c in text]) == "Hello world"
        assert [model.id async for model in client.models.list()] == ["stub-model"]
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await client.completions.create(model="gpt-9", prompt="Hello")
        for name in ("p0", "d0"):  # whichever serves it locally
            r[name].names_ids = False
            r[name].behaviour = dict.fromkeys(("local", "decode"), Behaviour("die", after=1))
        broken = await client.completions.create(model="stub-model", prompt="Hello", stream=True)
        with pytest.raises(openai.APIError, match=r"[pd]0"):
            async for _ in broken:
                pass


async def test_max_completion_tokens_is_one_on_the_prefill_leg() -> None:
    async with rig() as r:
        body = {"messages": MESSAGES, "max_completion_tokens": 9, "min_tokens": 3, "stream": True, "n": 1,
                "stream_options": {"include_usage": True}}  # fmt: skip
        assert (await r.post(body, path="/v1/chat/completions", policy="split")).status == 200
        [leg] = r["p0"].seen
        assert (leg.body["max_tokens"], leg.body["max_completion_tokens"], leg.body["stream"]) == (1, 1, False)
        assert not {"min_tokens", "stream_options"} & set(leg.body)
        assert r["d0"].seen[0].body["max_completion_tokens"] == 9


class _Reader:
    """A client that takes everything, and a deadline that does not matter."""

    is_full, waiting_for_client = False, False

    def write(self, data: bytes) -> None:
        return

    def extend(self, seconds: float) -> None:
        return


def test_the_longest_gap_of_a_stream_is_found_across_its_workers() -> None:
    clock, reader = ManualClock(), _Reader()

    def pipe(last_s: float | None) -> Pipe:
        return Pipe(None, EventFilter(1), reader, reader, 1.0, clock, last_s)  # type: ignore[arg-type]

    first = pipe(None)
    for pause_s in (9.0, 0.1, 0.3, 0.2):  # nothing is before the first piece
        clock.advance(pause_s)
        first.write(b"x")
    assert first.longest_gap_s == pytest.approx(0.3)
    clock.advance(2.0)
    second = pipe(first.last_s)  # another worker goes on
    second.write(b"x")
    assert second.longest_gap_s == pytest.approx(2.0)


async def test_the_record_has_the_longest_gap_of_a_stream_only() -> None:
    async with rig() as r:
        for stream in (True, False):
            answer = await r.post({"prompt": "a", "max_tokens": 8, "stream": stream})
            gap_s = (await r.record(answer.decision["id"]))["happened"].get("longest_gap_s")
            assert (gap_s is not None and 0 <= gap_s < 60.0) is stream
        assert await r.metric("longest_gap_seconds_count") == 1
