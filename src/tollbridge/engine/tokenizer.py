"""Text to token ids and back, over the model's own tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tollbridge.engine.base import ChatOptions, SamplingParams
from tollbridge.engine.detokenizer import IncrementalText
from tollbridge.engine.model import quiet_transformers
from tollbridge.engine.structure import Structures
from tollbridge.errors import RequestError, StartupError, UnsupportedError

_NO_OPTIONS = ChatOptions()


class ModelTokenizer:
    """Implements `base.Tokenizer` and, as a factory of text streams, `ports.TextStreamFactory`.

    Safe to call from several threads: it uses the Rust tokenizer directly and never changes its settings.
    """

    def __init__(self, folder: Path, *, name: str) -> None:
        """Load the tokenizer in `folder`; StartupError when there is none."""
        self._name = name
        self._fast = _load(folder, name)
        self._rust = self._fast.backend_tokenizer
        self._rust.no_padding()
        self._rust.no_truncation()
        self._reserved = {"messages", *inspect.signature(self._fast.apply_chat_template).parameters}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # `encode` holds the interpreter lock for the whole text (seconds per MiB), `encode_batch` does not
        ids: list[int] = self._rust.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text; incomplete characters show as U+FFFD."""
        text: str = self._rust.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Return each token as the vocabulary writes it, an id beyond it as an empty string."""
        return [self._rust.id_to_token(token_id) or "" for token_id in token_ids]

    def apply_chat_template(self, messages: list[dict[str, object]], options: ChatOptions = _NO_OPTIONS) -> list[int]:
        """Return the prompt's token ids; RequestError when the template refuses the messages."""
        if not self._fast.chat_template:
            raise UnsupportedError(f"Model {self._name} has no chat template; use /v1/completions.", param="messages")
        self._check(options)
        plain = [_with_plain_content(message) for message in messages]
        return self.encode(self._render(plain, options), add_special_tokens=options.add_special_tokens)

    def text_stream(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> IncrementalText:
        """Start the text of a request."""
        decode = self.decode if sampling.skip_special_tokens else self._decode_all
        return IncrementalText(decode, prompt_token_ids, sampling.stop, include_stop=sampling.include_stop)

    def structures(self, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Structures:
        """Return what compiles structured output for this vocabulary."""
        return Structures(self._fast, vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    def _decode_all(self, token_ids: list[int]) -> str:
        return self.decode(token_ids, skip_special_tokens=False)

    def _check(self, options: ChatOptions) -> None:
        """Refuse tools that the template would pass over in silence, and variables that are no such."""
        if options.tools and "tools" not in str(self._fast.chat_template):
            raise UnsupportedError(
                f'The chat template of {self._name} takes no tools: leave "tools" out, or describe them in a message.',
                param="tools",
            )
        for name in options.template_kwargs:
            if name in self._reserved:
                raise RequestError(f'"chat_template_kwargs" must not set "{name}".', param="chat_template_kwargs")

    def _render(self, messages: list[dict[str, object]], options: ChatOptions) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._fast.apply_chat_template(
                messages,
                tools=options.tools,
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **options.template_kwargs,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:  # what a template's own code may raise
            raise RequestError(
                f"The chat template of {self._name} refuses the messages: {error}", param="messages"
            ) from error
        return text


def _load(folder: Path, name: str) -> Any:
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise StartupError(f"Model {name} has no usable tokenizer in {folder}: {error}") from error
    if not tokenizer.is_fast:
        raise UnsupportedError(f"Model {name} has only a slow tokenizer ({type(tokenizer).__name__}).")
    return tokenizer


def _with_plain_content(message: dict[str, object]) -> dict[str, object]:
    """Return the message with OpenAI's list of text parts joined; templates expect one string."""
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(_text_of(part) for part in content)}


def _text_of(part: object) -> str:
    if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
        raise UnsupportedError("Message content may hold text parts only; this model reads no other.", param="messages")
    text: str = part["text"]
    return text
