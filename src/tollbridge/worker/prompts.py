"""A request's prompt as token ids, checked against the vocabulary.

Long texts are tokenized in one thread beside the event loop, one after the other. A text that is hopelessly long is
refused after its beginning: tokenizers need seconds for megabytes, and hold the interpreter lock meanwhile, so a single
request could stop every stream of this worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tollbridge.engine.base import ChatOptions, ModelInfo, Tokenizer
from tollbridge.errors import ContextLengthError, RequestError
from tollbridge.wire.openai import CompletionRequest
from tollbridge.worker.messages import plain_message

T = TypeVar("T")

INLINE_CHARACTERS = 2048  # about a millisecond of tokenizing
PROBE_CHARACTERS_PER_TOKEN = 6  # common text has 3 to 5: the first probe of a text that is too long says so
PROBE_SLACK_TOKENS = 64  # cutting a text changes the tokens around the cut, and only those


class Prompts:
    """Turns prompts into token ids. Owns one thread; `close` it."""

    def __init__(self, tokenizer: Tokenizer, model: ModelInfo) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = model.vocab_size
        self._max_tokens = model.max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def completion(self, asked: CompletionRequest) -> list[list[int]]:
        """Return the ids of each prompt of `asked`; RequestError otherwise."""
        return [await self._ids(prompt, asked) for prompt in split_prompts(asked.prompt)]

    async def _ids(self, prompt: str | list[int], asked: CompletionRequest) -> list[int]:
        if isinstance(prompt, str):
            return await self.text(prompt, add_special_tokens=asked.add_special_tokens)
        self.check_ids(prompt, "prompt")
        return prompt

    async def text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if not text:
            raise RequestError('Parameter "prompt" must not be empty.', param="prompt")
        ids = await self.tokenize(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise RequestError("The prompt has no tokens: give it some text.", param="prompt")
        return ids

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, which may be none."""
        await self._refuse_hopeless(text, "prompt")
        return await self._run(len(text), lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def messages(self, messages: list[dict[str, Any]], options: ChatOptions) -> list[int]:
        if not messages:
            raise RequestError('Parameter "messages" must not be empty.', param="messages")
        if len(messages) > self._max_tokens:
            raise self._too_long(len(messages), "messages")
        plain = [plain_message(index, message) for index, message in enumerate(messages)]
        text = "".join(str(value) for message in plain for value in message.values())  # all that a template may write
        text += str(options.tools or "") + str(options.template_kwargs or "")
        await self._refuse_hopeless(text, "messages")
        ids = await self._run(len(text), lambda: self._tokenizer.apply_chat_template(plain, options))
        if not ids:
            raise RequestError("The messages have no tokens: give them some text.", param="messages")
        return ids

    async def beside(self, work: Callable[[], T]) -> T:
        """Run what may take long beside the event loop, after the texts that wait."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def detokenize(self, ids: list[int]) -> str:
        if ids:
            self.check_ids(ids, "tokens")
        return await self._run(len(ids), lambda: self._tokenizer.decode(ids))

    def strings(self, ids: list[int]) -> list[str]:
        return self._tokenizer.token_strings(ids)

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raise RequestError naming the first id that is not in the vocabulary."""
        if min(ids) >= 0 and max(ids) < self._vocab_size:
            return
        wrong = next(token_id for token_id in ids if not 0 <= token_id < self._vocab_size)
        raise RequestError(
            f"Token id {wrong} is not in the vocabulary: it has {self._vocab_size} tokens, "
            f"so ids are within 0 and {self._vocab_size - 1}.",
            param=param,
        )

    async def _refuse_hopeless(self, text: str, param: str) -> None:
        """Raise ContextLengthError when a beginning of `text` has too many tokens; each try is four times longer."""
        num_characters = self._max_tokens * PROBE_CHARACTERS_PER_TOKEN
        while num_characters < len(text):
            num_tokens = len(await self._run(num_characters, partial(self._tokenizer.encode, text[:num_characters])))
            if num_tokens - PROBE_SLACK_TOKENS > self._max_tokens:
                raise self._too_long(num_tokens - PROBE_SLACK_TOKENS, param)
            num_characters *= 4

    def _too_long(self, num_tokens: int, param: str) -> ContextLengthError:
        return ContextLengthError(
            f"This model's maximum context length is {self._max_tokens} tokens. However, your request has at least "
            f"{num_tokens} input tokens. Please reduce the length of the input.",
            param=param,
        )

    async def _run(self, num_characters: int, work: Callable[[], T]) -> T:
        return work() if num_characters <= INLINE_CHARACTERS else await self.beside(work)


def split_prompts(prompt: str | list[int | str | list[int]]) -> list[str | list[int]]:
    """Return the prompts, each text or ids; RequestError when they are of several kinds, or none."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if not prompt or (kinds == {list} and not all(prompt)):
        raise RequestError('Parameter "prompt" must not be empty.', param="prompt")
    if len(kinds) > 1:
        raise RequestError('Parameter "prompt" mixes texts, token ids and lists: send one kind.', param="prompt")
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]
