"""The KV that the transfer claims move: layers x blocks x bytes, scattered over a paged cache."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """One request's KV. The default is 273 MB: Qwen3-0.6B in bf16, 2,384 tokens."""

    num_layers: int = 28
    num_blocks: int = 149  # of the request
    block_bytes: int = 64 * 1024
    cache_blocks: int = 160  # of the cache it lies in

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK_TOKENS

    def table(self, seed: int | None) -> list[int]:
        """Return the request's blocks in the cache: at random, or neighbours when `seed` is None."""
        if seed is None:
            return list(range(self.num_blocks))
        return random.Random(seed).sample(range(self.cache_blocks), self.num_blocks)

    def json(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        size = f"{self.num_layers} layers x {self.num_blocks} blocks x {self.block_bytes // 1024} KiB"
        return f"{self.num_bytes / 1e6:.0f} MB as {size}"
