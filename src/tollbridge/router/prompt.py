"""What a request's prompt is made of, read from its body without asking anybody: ids, a text, or messages."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import xxhash

from tollbridge.kv.content import LONG_BYTES, LongIds, Prompted, root_of
from tollbridge.router.ingress import Body, Call

Origin = Literal["ids", "tokenizer", "worker", "memory", "text", "none"]

# Fields that change the tokens of a prompt; a worker's /tokenize understands them under the same names.
_SHAPING = (
    "add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs", "continue_final_message",
    "documents", "mm_processor_kwargs", "reasoning_effort", "tools",
)  # fmt: skip
_PLAIN = frozenset({"add_generation_prompt", "add_special_tokens"})  # those that our own tokenizer understands
_UNKNOWABLE = ("prompt_embeds", "truncate_prompt_tokens")  # the worker's tokens are not those of the text

_IDS = msgspec.json.Decoder(list[int])
_ONE_LIST_OF_IDS = msgspec.json.Decoder(list[list[int]])
_TEXT = msgspec.json.Decoder(str | list[str])
_MESSAGES = msgspec.json.Decoder(list[dict[str, Any]])
_FLAG = msgspec.json.Decoder(bool)


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as the index looks it up. `num_tokens` is None when nobody has tokenised it."""

    content: Prompted | None
    num_tokens: int | None
    origin: Origin


NOTHING = Prompt(content=None, num_tokens=None, origin="none")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt before it is tokenised: exactly one of `text` and `messages`."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    raw: bytes  # as the client wrote it, with all that shapes its tokens
    shaping: Mapping[str, msgspec.Raw]
    flag: bool = True  # add_special_tokens of a text, add_generation_prompt of messages

    @property
    def is_plain(self) -> bool:
        """Whether a tokenizer and a template are all it takes."""
        if not self.shaping.keys() <= _PLAIN:
            return False
        return all(
            isinstance(message.get("content"), str) and "tool_calls" not in message for message in self.messages or ()
        )

    @property
    def num_bytes(self) -> int:
        return len(self.raw)

    def key(self, model: str | None) -> bytes:
        return xxhash.xxh3_128_digest((model or "").encode() + b"\0" + self.raw)


def maybe_ids(body: Body) -> list[int] | None:
    """Return the ids of a prompt that is one list of them; None for anything else."""
    raw = bytes(body.get("prompt", body.get("token_ids", b""))).lstrip()
    if not raw.startswith(b"["):
        return None
    try:
        if raw[1:].lstrip().startswith(b"["):
            lists = _ONE_LIST_OF_IDS.decode(raw)
            return lists[0] if len(lists) == 1 else None
        return _IDS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def maybe_long_ids(body: Body, lora: str | None, salt: str | None) -> LongIds | None:
    """Return the ids of a long prompt that is one flat list of them, undecoded; None for anything else."""
    raw = bytes(body.get("prompt", body.get("token_ids", b"")))
    if len(raw) <= LONG_BYTES or not raw.startswith(b"[") or raw.find(b"[", 1) > 0 or b'"' in raw:
        return None
    try:
        return LongIds(raw, root_of(lora, (salt,) if salt else ()))
    except (msgspec.DecodeError, UnicodeDecodeError, struct.error, ValueError):
        return None


def maybe_source(call: Call) -> Source | None:
    """Return the one text, or the messages, of a request; None when there is none or its tokens are not theirs."""
    body = call.body
    field = "messages" if "messages" in body else "prompt"
    given = {name: body[name] for name in _SHAPING if name in body and bytes(body[name]) != b"null"}
    if field not in body or any(name in body and bytes(body[name]) != b"null" for name in _UNKNOWABLE):
        return None
    raw = bytes(body[field])
    whole = raw + b"".join(name.encode() + bytes(value) for name, value in given.items())
    try:
        if field == "messages":
            flag = _flag(given, "add_generation_prompt")
            return Source(messages=_MESSAGES.decode(raw), raw=whole, shaping=given, flag=flag)
        text = _TEXT.decode(raw)
        if isinstance(text, list):
            if len(text) != 1:
                return None
            text = text[0]
        return Source(text=text, raw=whole, shaping=given, flag=_flag(given, "add_special_tokens"))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def salt_of(body: Body) -> str | None:
    """Return the request's cache_salt, which keeps its prefix apart from everybody else's."""
    raw = body.get("cache_salt")
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=str | None) or None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _flag(given: Mapping[str, msgspec.Raw], name: str) -> bool:
    return _FLAG.decode(given[name]) if name in given else True
