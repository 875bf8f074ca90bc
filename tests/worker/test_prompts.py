"""Long texts: refused early, tokenized beside the event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.fake_engine import MAX_MODEL_LEN, FakeEngine, FakeTokenizer
from tollbridge.engine.base import ModelInfo
from tollbridge.errors import ContextLengthError
from tollbridge.worker.prompts import INLINE_CHARACTERS, PROBE_CHARACTERS_PER_TOKEN, Prompts


class SpyTokenizer(FakeTokenizer):
    """Notes how much it is given, and in which thread. Spaces take no tokens."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.threads: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.lengths.append(len(text))
        self.threads.append(threading.current_thread().name)
        return list(text.replace(" ", "").encode())


@pytest.fixture
def info() -> ModelInfo:
    engine = FakeEngine()
    engine.shutdown()
    return engine.info


@pytest.fixture
def tokenizer() -> SpyTokenizer:
    return SpyTokenizer()


@pytest.fixture
def prompts(tokenizer: SpyTokenizer, info: ModelInfo) -> Iterator[Prompts]:
    made = Prompts(tokenizer, info)
    yield made
    made.close()


async def test_a_hopeless_text_is_refused_after_its_beginning(prompts: Prompts, tokenizer: SpyTokenizer) -> None:
    with pytest.raises(ContextLengthError, match="at least"):
        await prompts.text("a" * 1_000_000)
    assert tokenizer.lengths == [MAX_MODEL_LEN * PROBE_CHARACTERS_PER_TOKEN]


async def test_a_long_text_of_few_tokens_is_served(prompts: Prompts, tokenizer: SpyTokenizer) -> None:
    assert await prompts.text("a" + " " * 100_000) == [ord("a")]
    assert tokenizer.lengths[-1] == 100_001
    assert sum(tokenizer.lengths) < 3 * 100_001


async def test_only_long_texts_leave_the_event_loop(prompts: Prompts, tokenizer: SpyTokenizer) -> None:
    here = threading.current_thread().name
    await prompts.text("a" * 100)
    await prompts.text(" " * INLINE_CHARACTERS + "a")
    assert tokenizer.threads[0] == here
    assert tokenizer.threads[-1] != here
