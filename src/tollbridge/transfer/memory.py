"""`BufferMemory`: the paged KV memory of a process over one contiguous writable buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class BufferMemory:
    """A KVMemory over bytes laid out as [num_layers][num_blocks][block_size * token_bytes].

    `buffer` is anything with the buffer protocol, writable and C-contiguous (a bytearray, a numpy array, a torch
    storage's memoryview). It stays the caller's; views alias it. ValueError when its size does not fit the shape.
    """

    def __init__(self, buffer: Any, *, num_layers: int, num_blocks: int, block_size: int, token_bytes: int) -> None:
        if min(num_layers, num_blocks, block_size, token_bytes) <= 0:
            raise ValueError("num_layers, num_blocks, block_size and token_bytes must be positive")
        self._bytes = memoryview(buffer).cast("B")
        expected = num_layers * num_blocks * block_size * token_bytes
        if self._bytes.nbytes != expected or self._bytes.readonly:
            raise ValueError(f"the buffer must be writable and have {expected} bytes, not {self._bytes.nbytes}")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.token_bytes = token_bytes

    def views(self, layer: int, block_table: Sequence[int], first_token: int, num_tokens: int) -> list[memoryview]:
        """Return writable views of tokens [first_token, first_token + num_tokens) of `layer`, in order."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is not within 0..{self.num_layers - 1}")
        data, size = self._bytes, self.token_bytes
        base = layer * self.num_blocks * self.block_size  # in tokens
        return [
            data[(base + start) * size : (base + end) * size]
            for start, end in self._runs(block_table, first_token, num_tokens)
        ]

    def _runs(self, block_table: Sequence[int], first_token: int, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield [start, end) in slots (block * block_size + offset), neighbours merged."""
        if num_tokens <= 0:
            return
        size, last_token = self.block_size, first_token + num_tokens
        first_block, end_block = first_token // size, -(-last_token // size)
        blocks = block_table[first_block:end_block]
        if first_token < 0 or len(blocks) != end_block - first_block:
            raise ValueError(f"a table of {len(block_table)} blocks does not cover token {last_token - 1}")
        if min(blocks) < 0 or max(blocks) >= self.num_blocks:
            raise ValueError(f"the block table names a block outside 0..{self.num_blocks - 1}")
        previous = blocks[0]
        begin = previous * size + first_token % size
        for block in blocks[1:]:
            if block != previous + 1:
                yield begin, (previous + 1) * size
                begin = block * size
            previous = block
        yield begin, previous * size + (last_token - 1) % size + 1
