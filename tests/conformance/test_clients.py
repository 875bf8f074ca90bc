"""The real `openai` client against every server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.conformance.targets import Target

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

MESSAGES: list[Any] = [{"role": "user", "content": "Say something about bridges."}]


@pytest.fixture
def client(target: Target) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{target.url}/v1", api_key="none", default_headers=target.headers, max_retries=0
    ) as made:
        yield made


def test_chat(client: openai.OpenAI, target: Target) -> None:
    answer = client.chat.completions.create(model=target.model, messages=MESSAGES, max_tokens=8, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            model=target.model, messages=MESSAGES, max_tokens=8, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_completions(client: openai.OpenAI, target: Target) -> None:
    ask: dict[str, Any] = {"model": target.model, "prompt": "the toll", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**ask)
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)) == (
        whole.choices[0].text
    )
    assert target.model in [card.id for card in client.models.list()]


def test_errors_are_the_clients_classes(client: openai.OpenAI, target: Target) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=target.model, messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=target.model, prompt=[5] * 3000, max_tokens=1)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=target.model, input="x")
    with pytest.raises(openai.NotFoundError):
        client.images.generate(model=target.model, prompt="x")
