"""Names of KV blocks: a hash chain over the full blocks of a token sequence.

`h_i = xxh3_128(h_{i-1} || token ids of block i || cache salt)`, the salt in the first block only: equal hash, equal
prefix, equal KV. A block's name depends on everything before it, so the salt reaches every block of its chain. xxh3 is
fast and not keyed: tenants that may forge collisions on purpose are kept apart by their cache salts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

BlockHash = bytes  # 16 bytes

ROOT: BlockHash = bytes(16)  # stands before the first block
_LOW_64_BITS = (1 << 64) - 1


def block_hash(parent: BlockHash, token_ids: Sequence[int], extra: bytes = b"") -> BlockHash:
    """Return the hash of a full block of `token_ids` (each below 2**32) that follows `parent`."""
    return packed_hash(parent, pack(token_ids), extra)


def packed_hash(parent: BlockHash, packed: bytes, extra: bytes = b"") -> BlockHash:
    """Return the hash of a full block whose tokens are packed already."""
    return xxhash.xxh3_128_digest(parent + packed + extra)


def pack(token_ids: Sequence[int]) -> bytes:
    """Return `token_ids` (each below 2**32) as four bytes each; struct.error when one does not fit."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def event_hash(value: BlockHash) -> int:
    """Return the low 64 bits, which name the block in KV events."""
    return int.from_bytes(value, "big") & _LOW_64_BITS


def prompt_hashes(token_ids: Sequence[int], block_size: int, *, cache_salt: str | None = None) -> list[BlockHash]:
    """Return the hashes of the full blocks of `token_ids`, first block first."""
    chain = HashChain(block_size, cache_salt=cache_salt)
    chain.grow(token_ids)
    return chain.hashes


class HashChain:
    """The hashes of one growing sequence; tokens are only ever appended."""

    __slots__ = ("_block_size", "cache_salt", "hashes")

    def __init__(self, block_size: int, *, cache_salt: str | None = None) -> None:
        self._block_size = block_size
        self.cache_salt = cache_salt or None
        self.hashes: list[BlockHash] = []

    def grow(self, token_ids: Sequence[int]) -> None:
        """Hash the full blocks of `token_ids`, the whole sequence so far, that are not hashed yet."""
        size, hashes = self._block_size, self.hashes
        salt = self.cache_salt.encode() if self.cache_salt else b""
        for index in range(len(hashes), len(token_ids) // size):
            parent, extra = (hashes[-1], b"") if hashes else (ROOT, salt)
            hashes.append(block_hash(parent, token_ids[index * size : (index + 1) * size], extra))

    def parent(self, index: int) -> BlockHash | None:
        """Return the hash before block `index`, None for the first block."""
        return self.hashes[index - 1] if index else None
