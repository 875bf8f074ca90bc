"""The chat on a pipe: it keeps the conversation, and an error ends one answer only."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from tollbridge.cli import chat as chat_module
from tollbridge.cli.chat import chat
from tollbridge.cli.client import Answer, Message
from tollbridge.errors import UnavailableError


class FakeClient:
    """Answers "n messages", and fails when asked to."""

    asked: list[list[Message]]
    options: list[dict[str, Any]]

    def __init__(self, url: str, *, api_key: str | None) -> None:
        self.api_key = api_key

    async def __aenter__(self) -> FakeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def chat(self, messages: list[Message], *, on_text: Any, **options: Any) -> Answer:
        if messages[-1]["content"] == "fail":
            raise UnavailableError("nobody is ready.")
        FakeClient.asked.append(messages)
        FakeClient.options.append({"api_key": self.api_key, **options})
        text = f"{len(messages)} messages"
        on_text(text)
        return Answer(text=text, ttft_s=0.1, total_s=0.2, record=None)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    FakeClient.asked, FakeClient.options = [], []
    monkeypatch.setattr(chat_module, "RouterClient", FakeClient)
    monkeypatch.setenv("TOLLBRIDGE_API_KEY", "sk-1")
    return FakeClient


def test_once(fake: type[FakeClient], capsys: pytest.CaptureFixture[str]) -> None:
    assert chat("hi", policy="split", max_tokens=7) == 0
    out, err = capsys.readouterr()
    assert out == "1 messages\n"
    assert err.startswith("[no decision recorded;")
    assert fake.options == [{"api_key": "sk-1", "policy": "split", "max_tokens": 7}]


def test_once_passes_an_error_on() -> None:
    with pytest.raises(UnavailableError):
        chat("fail")


def test_a_conversation(
    fake: type[FakeClient], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\nfail\ntwo\n"))
    assert chat() == 0
    out, err = capsys.readouterr()
    assert out == "1 messages\n3 messages\n"
    assert "tollbridge: nobody is ready.\n" in err
    assert [message["content"] for message in fake.asked[-1]] == ["one", "1 messages", "two"]


def test_ctrl_c_at_the_prompt_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    with pytest.raises(KeyboardInterrupt):
        chat()
