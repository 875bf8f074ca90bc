"""`BufferMemory`: the paged KV memory of a process over one contiguous writable buffer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any


class BufferMemory:
    """A KVMemory over bytes laid out as [num_layers][num_blocks][block_size * token_bytes].

    `buffer` is anything with the buffer protocol, writable and C-contiguous (a bytearray, a numpy array, a torch
    storage's memoryview). It stays the caller's; views alias it. ValueError when its size does not fit the shape.
    """

    def __init__(self, buffer: Any, *, num_layers: int, num_blocks: int, block_size: int, token_bytes: int) -> None:
        if min(num_layers, num_blocks, block_size, token_bytes) <= 0:
            raise ValueError("num_layers, num_blocks, block_size and token_bytes must be positive")
        data = memoryview(buffer).cast("B")
        layer_bytes = num_blocks * block_size * token_bytes
        expected = num_layers * layer_bytes
        if data.nbytes != expected or data.readonly:
            raise ValueError(f"the buffer must be writable and have {expected} bytes, not {data.nbytes}")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.token_bytes = token_bytes
        self._layers = [data[layer * layer_bytes : (layer + 1) * layer_bytes] for layer in range(num_layers)]

    def views(self, layer: int, block_table: Sequence[int], first_token: int, num_tokens: int) -> list[memoryview]:
        """Return writable views of tokens [first_token, first_token + num_tokens) of `layer`, in order."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is not within 0..{self.num_layers - 1}")
        if num_tokens <= 0:
            return []
        size, end_token = self.block_size, first_token + num_tokens
        first_block, end_block = first_token // size, -(-end_token // size)
        blocks = tuple(block_table[first_block:end_block])
        if first_token < 0 or len(blocks) != end_block - first_block:
            raise ValueError(f"a table of {len(block_table)} blocks does not cover token {end_token - 1}")
        if min(blocks) < 0 or max(blocks) >= self.num_blocks:
            raise ValueError(f"the block table names a block outside 0..{self.num_blocks - 1}")
        slices = _slices(blocks, first_token % size, end_block * size - end_token, size, self.token_bytes)
        return list(map(self._layers[layer].__getitem__, slices))


@lru_cache(
    maxsize=256
)  # the same blocks come once per layer, and a slice of a small block costs as much as its checksum
def _slices(blocks: tuple[int, ...], skip: int, spare: int, block_size: int, token_bytes: int) -> tuple[slice, ...]:
    """Return slices of a layer's bytes: all of `blocks` but `skip` tokens in front and `spare` at the end."""
    runs: list[list[int]] = []  # [first block, end block], neighbours merged
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1][1] = block + 1
        else:
            runs.append([block, block + 1])
    edges = [[start * block_size, end * block_size] for start, end in runs]
    edges[0][0] += skip
    edges[-1][1] -= spare
    return tuple(slice(start * token_bytes, end * token_bytes) for start, end in edges)
