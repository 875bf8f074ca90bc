"""⑥ Two streams made one: listens to the first, and turns the events of its continuation into what the client goes on
reading. Pure.

A continuation is a completion of a longer prompt under another id. The client asked for something else: its own kind of
chunk under the id it knows, its own prompt counted as prompt and everything generated as generated, and no word twice.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tollbridge.errors import TollbridgeError
from tollbridge.router.resume import Resumable
from tollbridge.router.seam import Seam
from tollbridge.router.transcript import Choice, Chunk, Transcript, Usage, maybe_chunk, without_ids
from tollbridge.wire import sse

_DONE = b"[DONE]"


class DivergedError(TollbridgeError):
    """The continuation generated other tokens, or other text, than the client already has."""


class Listener:
    """Passes the events of the first stream on, less the token ids that only the router asked for."""

    def __init__(self, told: Transcript, *, wants_ids: bool) -> None:
        self._told, self._wants_ids = told, wants_ids

    def __call__(self, raw: bytes) -> bytes:
        self._told.read(sse.data(raw))
        return raw if self._wants_ids else without_ids(raw)


class Splice:
    """Passes on what is new in a continuation, and adds it to `told`."""

    def __init__(self, told: Transcript, resumable: Resumable, seam: Seam) -> None:
        self._told, self._resumable = told, resumable
        self._num_kept = seam.cut
        self._overlap = seam.overlap
        self._again = list(seam.again) if seam.overlap or resumable.wants_ids else []
        if not self._again:  # tokens that nobody has seen may as well be drawn anew
            told.cut_back(seam.cut)

    def __call__(self, raw: bytes) -> bytes:
        data = sse.data(raw)
        if data == _DONE:
            return raw
        chunk = maybe_chunk(data)
        if chunk is None:
            return b""
        if not chunk.choices:
            return usage_event(self._told, self._resumable, self._num_kept, chunk)
        return self._choice(chunk, chunk.choices[0])

    def _choice(self, chunk: Chunk, choice: Choice) -> bytes:
        ids, said = choice.token_ids or [], choice.said
        fresh = self._fresh_ids(ids)
        text = self._fresh_text(said, ended=choice.finish_reason is not None)
        self._told.add(fresh, text, choice.finish_reason)
        if not text and choice.finish_reason is None and not (fresh and self._resumable.wants_ids):
            return b""
        fields: dict[str, Any] = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        if self._resumable.wants_ids:
            fields["token_ids"] = fresh
        usage = _usage(self._told, self._num_kept, chunk) if self._resumable.continuous_usage else None
        return chunk_event(self._told, self._resumable, text, fields, usage)

    def _fresh_ids(self, ids: list[int]) -> list[int]:
        known = min(len(ids), len(self._again))
        if ids[:known] != self._again[:known]:
            raise DivergedError("The continuation generated other tokens than the client already has.")
        del self._again[:known]
        return ids[known:]

    def _fresh_text(self, said: str, *, ended: bool) -> str:
        known = min(len(said), len(self._overlap))
        if said[:known] != self._overlap[:known] or (ended and known < len(self._overlap)):
            raise DivergedError("The continuation says something else than the client already has.")
        self._overlap = self._overlap[known:]
        return said[known:]


def chunk_event(
    told: Transcript, resumable: Resumable, text: str, fields: dict[str, Any], usage: dict[str, int] | None = None
) -> bytes:
    """Return one chunk as the client expects it."""
    chat = resumable.kind == "chat"
    said = {"delta": {"content": text}} if chat else {"text": text}
    choice = {"index": 0, **said, "logprobs": None, **fields}
    return sse.event(_encode(told, chat, {"choices": [choice], **({"usage": usage} if usage else {})}))


def usage_event(told: Transcript, resumable: Resumable, num_kept: int, chunk: Chunk) -> bytes:
    """Return the usage chunk of the whole answer, nothing where the client did not ask for it or has it."""
    if not resumable.wants_usage or chunk.usage is None or told.has_usage:
        return b""
    told.has_usage = True
    usage = _usage(told, num_kept, chunk)
    return sse.event(_encode(told, resumable.kind == "chat", {"choices": [], "usage": usage}))


def ending(told: Transcript, resumable: Resumable) -> bytes:
    """Return the end of a stream that broke off when all was said: the finish unless it was told, usage, [DONE]."""
    events = b""
    if told.finish_reason is None:
        events += chunk_event(told, resumable, "", {"finish_reason": "length", "stop_reason": None})
    return events + usage_event(told, resumable, len(told.ids), Chunk(usage=Usage())) + sse.DONE


def _usage(told: Transcript, num_kept: int, chunk: Chunk) -> dict[str, int]:
    prompt, more = len(told.prompt_ids or []), chunk.usage.completion_tokens if chunk.usage else 0
    generated = num_kept + more
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _encode(told: Transcript, chat: bool, rest: dict[str, Any]) -> bytes:
    head = told.envelope or Chunk()
    kind = "chat.completion.chunk" if chat else "text_completion"
    return msgspec.json.encode({"id": head.id, "object": kind, "created": head.created, "model": head.model, **rest})
