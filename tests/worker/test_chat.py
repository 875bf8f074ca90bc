"""Shapes of /v1/chat/completions, whole and streamed."""

from __future__ import annotations

from tests.support.fake_engine import MAX_MODEL_LEN
from tests.worker.support import Client

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = b"<user>hi<assistant>"


async def test_whole_answer(client: Client) -> None:
    status, answer = await client.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3})
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 3
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert client.engine.submitted[0].prompt_token_ids == tuple(PROMPT)


async def test_first_chunk_has_the_role_and_the_last_the_finish(client: Client) -> None:
    chunks = await client.stream("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3})
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 3
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks] == ["assistant", None, None]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]


async def test_usage_and_token_ids(client: Client) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 2,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    first, second, last = await client.stream("/v1/chat/completions", body)
    assert first["prompt_token_ids"] == list(PROMPT)
    assert "prompt_token_ids" not in second
    assert len(first["choices"][0]["token_ids"]) == 1
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == len(PROMPT) + 2


async def test_default_is_the_room_left(client: Client) -> None:
    await client.post("/v1/chat/completions", {"messages": MESSAGES})
    assert client.engine.submitted[0].sampling.max_tokens == MAX_MODEL_LEN - len(PROMPT)


async def test_max_completion_tokens_wins(client: Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 9, "max_completion_tokens": 2}
    await client.post("/v1/chat/completions", body)
    assert client.engine.submitted[0].sampling.max_tokens == 2


async def test_text_parts_are_joined(client: Client) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert client.engine.submitted[0].prompt_token_ids == tuple(b"<user>h\ni<assistant>")


async def test_an_answer_of_ours_may_come_back_as_a_message(client: Client) -> None:
    _, answer = await client.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2})
    history = [*MESSAGES, answer["choices"][0]["message"], *MESSAGES]
    status, _ = await client.post("/v1/chat/completions", {"messages": history, "max_tokens": 2})
    assert status == 200


async def test_without_generation_prompt(client: Client) -> None:
    await client.post("/v1/chat/completions", {"messages": MESSAGES, "add_generation_prompt": False})
    assert client.engine.submitted[0].prompt_token_ids == tuple(b"<user>hi")
