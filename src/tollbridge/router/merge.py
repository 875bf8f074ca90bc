"""The answers to single prompts as one answer to their list: choices renumbered, usage summed. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tollbridge.errors import UpstreamError
from tollbridge.wire import sse

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]] | None)
_VALUE = msgspec.json.Decoder()

Fields = dict[str, msgspec.Raw]


class Chunks:
    """Merges the events of several streams, which all bear the id and the time of the first one."""

    def __init__(self) -> None:
        self._common: Fields = {}
        self._usage_chunk: Fields = {}
        self._usage: Any = None

    def take(self, data: bytes, first_choice: int) -> bytes:
        """Return the event for the client that the event with `data` becomes, empty when it is kept for the end.

        UpstreamError when it is no JSON object with choices.
        """
        fields, choices = _parse(data)
        self._common = self._common or {name: fields[name] for name in ("id", "created") if name in fields}
        fields |= self._common
        if not choices and _value(fields.get("usage")) is not None:
            self._usage = add(self._usage, _value(fields["usage"]))
            self._usage_chunk = fields
            return b""
        return sse.event(msgspec.json.encode(_renumbered(fields, choices, first_choice)))

    def last(self) -> bytes:
        """Return what ends the stream: the sum of the usage, if the parts had any, and [DONE]."""
        if self._usage is None:
            return sse.DONE
        return sse.event(msgspec.json.encode({**self._usage_chunk, "usage": self._usage})) + sse.DONE


def merge_whole(answers: Sequence[tuple[int, bytes]]) -> bytes:
    """Return one answer made of `answers`, each with the number of its first choice; the rest is the first one's.

    UpstreamError when one is no JSON object with choices.
    """
    whole: Fields = {}
    all_choices: list[Fields] = []
    usage: Any = None
    for first_choice, answer in answers:
        fields, choices = _parse(answer)
        whole = whole or fields
        all_choices += _numbered(choices, first_choice)
        usage = add(usage, _value(fields.get("usage")))
    return msgspec.json.encode({**whole, "choices": all_choices, "usage": usage})


def add(one: Any, other: Any) -> Any:
    """Return the sum of two usage objects: numbers add up, at every depth; None counts for nothing."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: add(one.get(name), other.get(name)) for name in [*one, *(other.keys() - one.keys())]}
    return one + other if isinstance(one, int | float) and isinstance(other, int | float) else one


def _parse(data: bytes) -> tuple[Fields, list[Fields]]:
    try:
        fields = _FIELDS.decode(data)
        return fields, _CHOICES.decode(fields.get("choices", b"null")) or []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpstreamError(f"A worker's answer to one prompt of the list was not understood: {error}.") from None


def _renumbered(fields: Fields, choices: list[Fields], first_choice: int) -> dict[str, Any]:
    return {**fields, "choices": _numbered(choices, first_choice)}


def _numbered(choices: list[Fields], first_choice: int) -> list[Fields]:
    """Return `choices` with `first_choice` added to each index."""
    return [
        {**choice, "index": msgspec.Raw(b"%d" % (first_choice + int(_value(choice.get("index")) or 0)))}
        for choice in choices
    ]


def _value(raw: msgspec.Raw | None) -> Any:
    return _VALUE.decode(raw) if raw is not None else None
