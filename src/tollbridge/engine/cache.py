"""The paged KV cache: one tensor, token-major, so that what is shipped is what lies there.

Layout: `[num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim]`, the 2 being K then V. One token in one layer
is one contiguous run of bytes, a block is `block_size` of them, and neighbouring blocks are neighbours in memory. So a
transfer sends straight from the cache and receives straight into it, and a partial block ships exactly its tokens.
(Head-major blocks would serve some attention kernels better, but scatter a token over `2 * num_kv_heads` places.)

The cache knows slots, not sequences: who owns which block is the business of `kv/` and of the engine's loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tollbridge.errors import UnsupportedError
from tollbridge.transfer.memory import HostMemory
from tollbridge.transfer.rows import Bytes, as_bytes
from tollbridge.transfer.shared import SharedBuffer

LAYOUT = "token-major:k,v"


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """The dimensions of a paged KV cache."""

    num_layers: int
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, K and V."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.block_size * self.token_bytes


@dataclass(frozen=True, kw_only=True)
class KVCacheStatistics:
    """Size of the cache; it never changes."""

    num_blocks: int
    num_bytes: int


class PagedKVCache(HostMemory):
    """KV of all layers in fixed blocks. Implements `transfer.base.KVMemory` on a CPU."""

    def __init__(self, shape: KVShape, *, num_blocks: int, device: torch.device) -> None:
        """Allocate and zero-fill: every page is resident before the first request, none is faulted in on the way."""
        self.shape = shape
        self.num_layers = shape.num_layers
        self.num_blocks = num_blocks
        self.block_size = shape.block_size
        self.granule_bytes = shape.token_bytes
        # [num_layers, num_slots, 2, num_kv_heads, head_dim]; slot = block * block_size + token within the block
        size = (shape.num_layers, num_blocks * shape.block_size, 2, shape.num_kv_heads, shape.head_dim)
        if device.type == "cpu":
            self._shared = SharedBuffer(num_blocks * shape.block_bytes)
            self.shared_fd = self._shared.fd
            self.tensor = torch.frombuffer(self._shared.data, dtype=shape.dtype).view(size).zero_()
        else:
            self.tensor = torch.empty(size, dtype=shape.dtype, device=device).zero_()
        self.layers: tuple[torch.Tensor, ...] = tuple(self.tensor)  # each [num_slots, 2, num_kv_heads, head_dim]
        self._bytes = _byte_view(self.tensor) if device.type == "cpu" else None

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store `key` and `value` `[num_tokens, num_kv_heads, head_dim]` at `slots` `[num_tokens]`."""
        self.layers[layer].index_copy_(0, slots, torch.stack((key, value), dim=1))

    def byte_layers(self) -> list[torch.Tensor]:
        """Return each layer as bytes, `[num_blocks, bytes of a block]`, views of the cache."""
        return [layer.view(self.num_blocks, -1).view(torch.uint8) for layer in self.layers]

    def views(self, layer: int, block_table: Sequence[int], first_token: int, num_tokens: int) -> list[memoryview]:
        """Return writable byte views of tokens [first_token, first_token + num_tokens), in order, without a copy.

        Neighbouring blocks are merged into one view. Raises IndexError when the table or the cache does not cover the
        range, UnsupportedError when the cache is not in host memory.
        """
        if self._bytes is None:
            raise UnsupportedError(
                f"The KV cache is on {self.tensor.device}; only a cache in host memory can be shipped."
            )
        self._check_range(layer, block_table, first_token, num_tokens)
        views = []
        token, end = first_token, first_token + num_tokens
        while token < end:
            index = token // self.block_size
            run_end = min(end, _end_of_run(block_table, index) * self.block_size)
            slot = block_table[index] * self.block_size + token % self.block_size
            views.append(self._slot_bytes(layer, slot, run_end - token))
            token = run_end
        return views

    def maybe_blocks(self, layer: int) -> Bytes | None:
        assert self._bytes is not None
        return as_bytes(self._bytes).reshape(self.num_layers, self.num_blocks, -1)[layer]

    def regions(self) -> list[memoryview]:
        return [] if self._bytes is None else [self._bytes]

    def statistics(self) -> KVCacheStatistics:
        return KVCacheStatistics(num_blocks=self.num_blocks, num_bytes=self.tensor.nbytes)

    def _slot_bytes(self, layer: int, slot: int, num_slots: int) -> memoryview:
        assert self._bytes is not None
        start = (layer * self.num_blocks * self.block_size + slot) * self.granule_bytes
        return self._bytes[start : start + num_slots * self.granule_bytes]

    def _check_range(self, layer: int, block_table: Sequence[int], first_token: int, num_tokens: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} is outside [0, {self.num_layers})")
        if first_token < 0 or num_tokens < 0 or first_token + num_tokens > len(block_table) * self.block_size:
            raise IndexError(
                f"tokens [{first_token}, {first_token + num_tokens}) are not covered by {len(block_table)} blocks of "
                f"{self.block_size}"
            )
        used = block_table[first_token // self.block_size : -(-(first_token + num_tokens) // self.block_size)]
        if used and not (min(used) >= 0 and max(used) < self.num_blocks):
            raise IndexError(f"a block id of {list(used)} is outside [0, {self.num_blocks})")


def num_blocks_for(shape: KVShape, num_bytes: int) -> int:
    """Return how many blocks fit into `num_bytes`."""
    return num_bytes // shape.block_bytes


def _end_of_run(block_table: Sequence[int], index: int) -> int:
    """Return the index after the last block that neighbours the ones from `index` on."""
    end = index + 1
    while end < len(block_table) and block_table[end] == block_table[end - 1] + 1:
        end += 1
    return end


def _byte_view(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of the bytes of a contiguous CPU tensor (numpy has no bfloat16, but it has bytes)."""
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view
