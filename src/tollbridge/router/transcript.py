"""What a stream has told its client so far, by tokens and by text: all that another worker needs to go on. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

# A key with its quotes cannot occur inside generated text: there the quotes are escaped.
_IDS = re.compile(rb',\s*"(?:prompt_)?token_ids"\s*:\s*(?:\[[^\[\]]*\]|null)')


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct, frozen=True):
    """A choice of a chunk, of a completion or a chat."""

    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def said(self) -> str:
        return (self.delta.content if self.delta is not None else self.text) or ""


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct, frozen=True):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[Choice] = []
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


_decode_chunk = msgspec.json.Decoder(Chunk).decode


@dataclass
class Transcript:
    """Grows with the stream, whoever sends it."""

    prompt_ids: list[int] | None = None
    ids: list[int] = field(default_factory=list)  # generated, as told
    pieces: list[tuple[int, str]] = field(default_factory=list)  # per chunk: number of ids, text
    finish_reason: str | None = None
    has_usage: bool = False  # the usage chunk was told
    envelope: Chunk | None = None  # id, created and model of the first chunk
    obstacle: str | None = None  # a code of `resume.OBSTACLES`

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)

    def read(self, data: bytes) -> None:
        """Take the data of one event; what is no chunk is passed over."""
        chunk = maybe_chunk(data)
        if chunk is None:
            return
        if self.envelope is None:
            self.envelope = Chunk(id=chunk.id, created=chunk.created, model=chunk.model)
        self.has_usage |= not chunk.choices and chunk.usage is not None
        for choice in chunk.choices:
            self.prompt_ids = self.prompt_ids or choice.prompt_token_ids or chunk.prompt_token_ids
            self._note_obstacle(choice)
            self.add(choice.token_ids or [], choice.said, choice.finish_reason)

    def add(self, ids: list[int], text: str, finish_reason: str | None) -> None:
        self.ids.extend(ids)
        self.pieces.append((len(ids), text))
        self.finish_reason = finish_reason or self.finish_reason

    def cut_back(self, cut: int) -> None:
        """Forget the tokens behind the first `cut`; what they said stays said."""
        too_many = len(self.ids) - cut
        del self.ids[cut:]
        for at in range(len(self.pieces) - 1, -1, -1):
            num_ids, text = self.pieces[at]
            gone = min(num_ids, too_many)
            self.pieces[at] = (num_ids - gone, text)
            too_many -= gone
            if not too_many:
                break

    def _note_obstacle(self, choice: Choice) -> None:
        delta = choice.delta
        if delta is not None and delta.tool_calls:
            self.obstacle = "tools"
        elif delta is not None and (delta.reasoning or delta.reasoning_content):
            self.obstacle = "reasoning"
        elif choice.said and not choice.token_ids and not self.ids:
            self.obstacle = "no_token_ids"


def maybe_chunk(data: bytes) -> Chunk | None:
    """Return the chunk in `data`, None when it is something else."""
    try:
        return _decode_chunk(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def without_ids(raw: bytes) -> bytes:
    """Return an event less the token ids that the client did not ask for."""
    return _IDS.sub(b"", raw)
