"""Answers to single prompts, merged."""

from __future__ import annotations

import json

import pytest

from tollbridge.errors import UpstreamError
from tollbridge.router.merge import Chunks, add, merge_whole


def chunk(name: str, index: int, **more: object) -> bytes:
    return json.dumps({"id": name, "created": len(name), "choices": [{"index": index, "text": name}]} | more).encode()


def data(event: bytes) -> dict[str, object]:
    return dict(json.loads(event.removeprefix(b"data: ")))


def test_chunks_share_id_and_time() -> None:
    chunks = Chunks()
    one, two = data(chunks.take(chunk("a", 0), 0)), data(chunks.take(chunk("bb", 1), 4))
    assert (two["id"], two["created"]) == (one["id"], one["created"]) == ("a", 1)
    assert two["choices"] == [{"index": 5, "text": "bb"}]
    assert chunks.last() == b"data: [DONE]\n\n"


def test_usage_chunks_are_summed() -> None:
    chunks = Chunks()
    for count in (3, 4):
        usage = {"prompt_tokens": count, "prompt_tokens_details": {"cached_tokens": 1}, "other": None}
        assert chunks.take(json.dumps({"id": "a", "choices": [], "usage": usage}).encode(), 0) == b""
    event, done = chunks.last().split(b"\n\n", 1)
    expected = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}, "other": None}
    assert data(event) == {"id": "a", "choices": [], "usage": expected}
    assert done == b"data: [DONE]\n\n"


def test_running_usage_is_passed_on() -> None:
    chunks = Chunks()
    assert data(chunks.take(chunk("a", 0, usage={"prompt_tokens": 1}), 0))["usage"] == {"prompt_tokens": 1}
    assert chunks.last() == b"data: [DONE]\n\n"


def test_whole_answers() -> None:
    whole = json.loads(merge_whole([(0, chunk("a", 0, usage={"n": 1})), (2, chunk("b", 1, usage={"n": 2}))]))
    assert whole["id"] == "a"
    assert [choice["index"] for choice in whole["choices"]] == [0, 3]
    assert whole["usage"] == {"n": 3}


@pytest.mark.parametrize("answer", [b"", b"[1]", b'{"choices": 3}', b'{"choices": [1]}', b"\xff"])
def test_what_is_no_answer(answer: bytes) -> None:
    with pytest.raises(UpstreamError):
        merge_whole([(0, answer)])
    with pytest.raises(UpstreamError):
        Chunks().take(answer, 0)


def test_add() -> None:
    assert add(None, {"a": 1}) == {"a": 1}
    assert add({"a": 1, "b": "x"}, {"a": 2, "c": {"d": 1}}) == {"a": 3, "b": "x", "c": {"d": 1}}
