"""What a prompt consists of, as bytes that can be cut into blocks and hashed: tokens where they are known, else text.

Two prompts share a prefix in some cache only if their tokens do and they were computed under the same adapter and the
same cache salt. Those two, the *root*, enter the hash of the first block, and so reach every block of the chain.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_128_digest

from tollbridge.kv.hashes import ROOT, BlockHash, pack

TOKEN_BYTES = 4
LONG_BYTES = 1024  # of JSON: about 150 ids, which take 5 us to decode
_IDS = msgspec.json.Decoder(list[int])
_TEXT_ROOT = b"text"


class Content(NamedTuple):
    """`data` is a run of units of `unit_bytes` each: 4 for a token id, 1 for text."""

    data: bytes
    unit_bytes: int
    root: bytes

    @classmethod
    def of_tokens(cls, token_ids: Sequence[int], *, lora: str | None = None, salt: str | None = None) -> Content:
        """`token_ids` are each below 2**32; struct.error otherwise."""
        return cls(pack(token_ids), TOKEN_BYTES, root_of(lora, (salt,) if salt else ()))

    @classmethod
    def of_text(cls, text: bytes, *, lora: str | None = None, salt: str | None = None) -> Content:
        return cls(text, 1, _TEXT_ROOT + root_of(lora, (salt,) if salt else ()))

    @property
    def num_units(self) -> int:
        return len(self.data) // self.unit_bytes

    def hashes(self, block_size: int) -> Iterator[BlockHash]:
        """Yield the names of its full blocks of `block_size` units; lazily, for most lookups end early."""
        data, step, value, extra = self.data, block_size * self.unit_bytes, ROOT, self.root
        for start in range(0, len(data) - step + 1, step):
            value = xxh3_128_digest(value + data[start : start + step] + extra)
            extra = b""
            yield value


class LongIds:
    """A long prompt of token ids that is still JSON: what `Content` is, but decoded no further than it is looked up.

    Most lookups end within the first blocks, and a decision does not wait for the rest. `raw` is a flat JSON list; what
    is wrong with it behind its first piece is the worker's to say: here the prompt then ends before it.
    """

    unit_bytes = TOKEN_BYTES

    def __init__(self, raw: bytes, root: bytes) -> None:
        """Decode the first piece; msgspec.DecodeError or struct.error when that is no list of token ids."""
        self.root = root
        self.num_units = raw.count(b",") + 1
        self._raw = raw
        self._at = 1  # of what is not decoded yet; its size at the end
        self._data = b""
        self._decode(LONG_BYTES)

    @property
    def data(self) -> bytes:
        while self._grow():
            pass
        return self._data

    def hashes(self, block_size: int) -> Iterator[BlockHash]:
        """Yield the names of its full blocks, as `Content.hashes` does."""
        start, step, value, extra = 0, block_size * TOKEN_BYTES, ROOT, self.root
        while True:
            data = self._data
            for at in range(start, len(data) - step + 1, step):
                value = xxh3_128_digest(value + data[at : at + step] + extra)
                start, extra = at + step, b""
                yield value
            if not self._grow():
                return

    def _grow(self) -> bool:
        """Decode another piece; False at the end, or where what follows is none."""
        if self._at >= len(self._raw):
            return False
        try:
            self._decode(self._at + max(LONG_BYTES, self._at // 2))
        except (msgspec.DecodeError, struct.error):
            self._at = len(self._raw)
            return False
        return True

    def _decode(self, aim: int) -> None:
        """Decode up to the last comma before `aim`, or all when there is none."""
        raw, at = self._raw, self._at
        end = raw.rfind(b",", at, aim) if aim < len(raw) else -1
        piece = raw[at:] if end < 0 else raw[at:end] + b"]"
        self._data += pack(_IDS.decode(b"[" + piece))
        self._at = len(raw) if end < 0 else end + 1


Prompted = Content | LongIds


def root_of(lora: str | None, keys: Iterable[Any]) -> bytes:
    """Return what distinguishes the first block of a chain besides its tokens: adapter, salt, pictures."""
    keys = list(keys)
    return msgspec.msgpack.encode([lora, *keys]) if lora or keys else b""


def keys_of(keys: Sequence[Any] | None, lora: str | None) -> list[Any]:
    """Return the extra keys of a block as vLLM's events list them, less the adapter's name, which leads each list."""
    if not keys:
        return []
    return list(keys[1:] if lora is not None and keys[0] == lora else keys)


def extra_of(keys: Sequence[Any]) -> bytes:
    """Return what distinguishes a later block besides its tokens and its parent."""
    return msgspec.msgpack.encode(keys) if keys else b""
