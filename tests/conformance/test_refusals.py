"""What every server refuses, with the same status; and the differences, each as its row says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.differences import CHAT, DIFFERENCES, DOCUMENT, TEXT, Difference, written
from tests.conformance.targets import Target

SERVERS = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
USER = {"role": "user", "content": "What is a toll?"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def text(**more: Any) -> tuple[str, object]:
    return TEXT, {"model": "MODEL", "prompt": "A toll", "max_tokens": 2, "temperature": 0, **more}


def chat(**more: Any) -> tuple[str, object]:
    return CHAT, {"model": "MODEL", "messages": [USER], "max_tokens": 2, "temperature": 0, **more}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# request -> path and body, status, the parameter that we name
REFUSED: dict[str, tuple[tuple[str, object], int, str | None]] = {
    "no JSON": ((TEXT, b"{"), 400, None),
    "no object": ((TEXT, b"[]"), 400, None),
    "nothing": ((TEXT, b""), 400, None),
    "no UTF-8": ((TEXT, b"\xff\xfe"), 400, None),
    "NaN": ((TEXT, b'{"prompt": "a", "temperature": NaN}'), 400, None),
    "no prompt": ((TEXT, {"model": "MODEL"}), 400, "prompt"),
    "no messages": ((CHAT, {"model": "MODEL"}), 400, "messages"),
    "model of a completion": (text(model="nobody"), 404, "model"),
    "model of a chat": (chat(model="nobody"), 404, "model"),
    "model of tokenize": (("/tokenize", {"model": "nobody", "prompt": "a"}), 404, "model"),
    "prompt empty": (text(prompt=""), 400, "prompt"),
    "prompt null": (text(prompt=None), 400, "prompt"),
    "prompt of no ids": (text(prompt=[]), 400, "prompt"),
    "prompt of no ids in a list": (text(prompt=[[]]), 400, "prompt"),
    "prompt of an object": (text(prompt={"a": 1}), 400, "prompt"),
    "prompt with an unknown id": (text(prompt=[99_999]), 400, "prompt"),
    "prompt with a negative id": (text(prompt=[-1]), 400, "prompt"),
    "prompt too long": (text(prompt=[300] * 3000), 400, "prompt"),
    "prompt far too long": (text(prompt="x" * 60_000), 400, "prompt"),
    "max_tokens 0": (text(max_tokens=0), 400, "max_tokens"),
    "max_tokens below": (text(max_tokens=-1), 400, "max_tokens"),
    "max_tokens beyond": (text(max_tokens=100_000), 400, "max_tokens"),
    "max_tokens text": (text(max_tokens="x"), 400, "max_tokens"),
    "max_tokens fraction": (text(max_tokens=1.5), 400, "max_tokens"),
    "max_tokens of a chat": (chat(max_tokens=0), 400, "max_tokens"),
    "temperature below": (text(temperature=-1), 400, "temperature"),
    "temperature above": (text(temperature=2.5), 400, "temperature"),
    "temperature text": (text(temperature="x"), 400, "temperature"),
    "top_p 0": (text(top_p=0), 400, "top_p"),
    "top_p above": (text(top_p=2), 400, "top_p"),
    "top_k below": (text(top_k=-2), 400, "top_k"),
    "seed text": (text(seed="x"), 400, "seed"),
    "seed too large": (text(seed=1 << 70), 400, "seed"),
    "n 0": (text(n=0), 400, "n"),
    "stop empty": (text(stop=[""]), 400, "stop"),
    "stop of numbers": (text(stop=[1]), 400, "stop"),
    "too many stops": (text(stop=["a"] * 40), 400, "stop"),
    "stop id unknown": (text(stop_token_ids=[-5]), 400, "stop_token_ids"),
    "salt empty": (text(cache_salt=""), 400, "cache_salt"),
    "suffix": (text(suffix="x"), 400, "suffix"),
    "stream options without a stream": (text(stream_options={"include_usage": True}), 400, "stream_options"),
    "stream options of text": (text(stream=True, stream_options={"include_usage": "x"}), 400, "stream_options"),
    "messages empty": (chat(messages=[]), 400, "messages"),
    "messages null": (chat(messages=None), 400, "messages"),
    "messages of text": (chat(messages="x"), 400, "messages"),
    "message without a role": (chat(messages=[{"content": "x"}]), 400, "messages"),
    "message of an unknown role": (chat(messages=[{"role": "martian", "content": "x"}]), 400, "messages"),
    "message with an image": (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]),
        400,
        "messages",
    ),
    "open message and generation prompt": (chat(continue_final_message=True), 400, "continue_final_message"),
    "format unknown": (chat(response_format={"type": "bogus"}), 400, "response_format"),
    "tools empty": (chat(tools=[]), 400, "tools"),
    "tools of another kind": (chat(tools=[{"type": "bogus"}]), 400, "tools"),
    "choice without tools": (chat(tool_choice="auto"), 400, "tool_choice"),
    "choice unknown": (chat(tools=[TOOL], tool_choice="bogus"), 400, "tool_choice"),
    "choice of another tool": (chat(tools=[TOOL], tool_choice=named("nope")), 400, "tool_choice"),
    "chat_template": (chat(chat_template="x"), 400, "chat_template"),
    "top_logprobs alone": (chat(top_logprobs=2), 400, "top_logprobs"),
    "tokenize nothing": (("/tokenize", {}), 400, "prompt"),
    "tokenize a list": (("/tokenize", {"prompt": ["a", "b"]}), 400, "prompt"),
    "tokenize no messages": (("/tokenize", {"messages": []}), 400, "messages"),
    "detokenize nothing": (("/detokenize", {"prompt": "x"}), 400, "prompt"),
    "detokenize a negative id": (("/detokenize", {"tokens": [-1]}), 400, "tokens"),
    "embeddings": (("/v1/embeddings", {"model": "MODEL", "input": "x"}), 404, None),
    "rerank": (("/v1/rerank", {"model": "MODEL", "query": "x", "documents": []}), 404, None),
    "images": (("/v1/images/generations", {"model": "MODEL", "prompt": "x"}), 404, None),
    "transcriptions": (("/v1/audio/transcriptions", {"model": "MODEL"}), 404, None),
    "moderations": (("/v1/moderations", {"input": "x"}), 404, None),
    "batches": (("/v1/batches", {}), 404, None),
    "assistants": (("/v1/assistants", {"model": "MODEL"}), 404, None),
}


class TestServers:
    pytestmark = SERVERS

    @pytest.mark.parametrize("case", REFUSED)
    def test_refused_by_all(self, target: Target, case: str) -> None:
        (path, body), status, param = REFUSED[case]
        answer = target.ask(path, body)
        assert answer.status == status, answer.raw
        if target.is_router:
            assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        if target.is_embedded:
            assert_error(answer.json, status)
            assert answer.json["error"]["param"] == param

    @pytest.mark.parametrize("row", [d for d in DIFFERENCES if d.path], ids=lambda row: row.asks)
    def test_differences(self, target: Target, row: Difference) -> None:
        is_ours = applies(row, target)
        answer = target.ask(row.path, row.body, **dict(row.headers))
        assert answer.status == (row.ours if is_ours else row.vllm), answer.raw
        if is_ours and answer.status != 200:
            assert_error(answer.json, answer.status)
            assert answer.json["error"]["param"] == row.param

    def test_get_of_a_posting_path(self, target: Target) -> None:
        import urllib.error
        import urllib.request

        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(target.url + TEXT, timeout=30)
        assert refused.value.code == 405
        assert refused.value.headers["Allow"] == "POST"
        refused.value.close()


def applies(row: Difference, target: Target) -> bool:
    if row.where == "worker":
        return target.name == "worker"
    return target.is_embedded or (row.where == "both" and target.is_router)


def test_the_document_has_the_table() -> None:
    """Otherwise: `python -m tests.conformance.differences`."""
    document = DOCUMENT.read_text()
    assert document == written(document)


def assert_error(body: dict[str, Any], status: int) -> None:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert "Traceback" not in error["message"]
    assert "\n" not in error["message"]
