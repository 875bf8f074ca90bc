"""What a prompt consists of, as bytes that can be cut into blocks and hashed: tokens where they are known, else text.

Two prompts share a prefix in some cache only if their tokens do and they were computed under the same adapter and the
same cache salt. Those two, the *root*, enter the hash of the first block, and so reach every block of the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tollbridge.kv.hashes import ROOT, BlockHash, pack, packed_hash

TOKEN_BYTES = 4
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
            value = packed_hash(value, data[start : start + step], extra)
            extra = b""
            yield value


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
