"""KV memory that the CPU can address: `HostMemory`, and `BufferMemory` over one contiguous writable buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tollbridge.transfer import rows
from tollbridge.transfer.rows import Bytes
from tollbridge.transfer.stage import PASSED, DirectStage, Fence, Span, Stage


class HostMemory(ABC):
    """A KVMemory whose blocks lie in host memory: what it adds to the geometry is `views`, and sockets use those."""

    num_layers: int
    num_blocks: int
    block_size: int
    granule: int = 1
    granule_bytes: int
    max_frame_bytes: int = 2 * 1024 * 1024
    num_streams: int = 4  # one stream leaves a fast link idle whenever its thread waits for a core (docs/LOG.md)
    batch_bytes: int = 0
    shared_fd: int | None = None  # a file whose bytes are laid out as in BufferMemory: other processes can map it

    @abstractmethod
    def views(self, layer: int, block_table: Sequence[int], first_token: int, num_tokens: int) -> list[memoryview]:
        """Return writable byte views of tokens [first_token, first_token + num_tokens), in order, without a copy.

        The range begins on a granule's edge, and a partial last granule counts as a whole one. Neighbouring blocks are
        merged into one view.
        """

    def span_views(self, span: Span) -> list[memoryview]:
        """Return the views of all layers of `span`, one layer behind the other."""
        if span.num_layers == 1:
            return self.views(span.layer, span.table, span.first_token, span.num_tokens)
        return [
            view for layer in span.layers for view in self.views(layer, span.table, span.first_token, span.num_tokens)
        ]

    def maybe_blocks(self, layer: int) -> Bytes | None:
        """Return a layer as an array [num_blocks, bytes of a block]; None when its blocks are not one run of bytes."""
        return None

    def regions(self) -> list[memoryview]:
        """Return what a NIC may be shown: all bytes that `views` aliases; empty when that is not known."""
        return []

    def copy_out(self, span: Span, target: memoryview) -> None:
        """Copy the granules of `span` to `target`, which they fill."""
        size = len(target) // span.num_layers
        for index, layer in enumerate(span.layers):
            part, blocks = target[index * size : (index + 1) * size], self.maybe_blocks(layer)
            if blocks is not None and rows.is_whole(span, self.block_size):
                rows.gather(blocks, span, part, block_size=self.block_size)
            else:
                rows.join(self.views(layer, span.table, span.first_token, span.num_tokens), part)

    def copy_in(self, source: memoryview, span: Span) -> None:
        """Copy `source` to the granules of `span`, which it fills."""
        size = len(source) // span.num_layers
        for index, layer in enumerate(span.layers):
            part, blocks = source[index * size : (index + 1) * size], self.maybe_blocks(layer)
            if blocks is not None and rows.is_whole(span, self.block_size):
                rows.scatter(part, blocks, span, block_size=self.block_size)
            else:
                rows.part(part, self.views(layer, span.table, span.first_token, span.num_tokens))

    def fence(self) -> Fence:
        """Return a fence that is behind us: what the CPU wrote is written."""
        return PASSED

    def stage(self, *, max_payload_bytes: int, ring_bytes: int | None) -> Stage:
        """Return the way straight from and to the cache; it needs no ring."""
        return DirectStage(self, max_payload_bytes)


class BufferMemory(HostMemory):
    """A KVMemory over bytes laid out as [num_layers][num_blocks][block_size * token_bytes].

    `buffer` is anything with the buffer protocol, writable and C-contiguous (a bytearray, a numpy array, a torch
    storage's memoryview). It stays the caller's; views alias it. `granule` divides `block_size`. ValueError when its
    size does not fit the shape.
    """

    def __init__(
        self, buffer: Any, *, num_layers: int, num_blocks: int, block_size: int, token_bytes: int, granule: int = 1
    ) -> None:
        if min(num_layers, num_blocks, block_size, token_bytes, granule) <= 0 or block_size % granule:
            raise ValueError(
                "num_layers, num_blocks, block_size, token_bytes and granule must be positive, "
                "and granule must divide block_size"
            )
        data = memoryview(buffer).cast("B")
        layer_bytes = num_blocks * block_size * token_bytes
        expected = num_layers * layer_bytes
        if data.nbytes != expected or data.readonly:
            raise ValueError(f"the buffer must be writable and have {expected} bytes, not {data.nbytes}")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.token_bytes = token_bytes
        self.granule = granule
        self.granule_bytes = granule * token_bytes
        self._data = data
        self._layers = [data[layer * layer_bytes : (layer + 1) * layer_bytes] for layer in range(num_layers)]
        self._blocks = [rows.as_bytes(layer).reshape(num_blocks, -1) for layer in self._layers]

    def maybe_blocks(self, layer: int) -> Bytes | None:
        return self._blocks[layer]

    def regions(self) -> list[memoryview]:
        return [self._data]

    def views(self, layer: int, block_table: Sequence[int], first_token: int, num_tokens: int) -> list[memoryview]:
        """Return writable views of tokens [first_token, first_token + num_tokens) of `layer`, in order."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is not within 0..{self.num_layers - 1}")
        if num_tokens <= 0:
            return []
        size, granule = self.block_size, self.granule
        end_token = -(-(first_token + num_tokens) // granule) * granule
        first_block, end_block = first_token // size, -(-end_token // size)
        blocks = tuple(block_table[first_block:end_block])
        if first_token < 0 or len(blocks) != end_block - first_block:
            raise ValueError(f"a table of {len(block_table)} blocks does not cover token {end_token - 1}")
        if first_token % granule:
            raise ValueError(f"token {first_token} does not begin a granule of {granule} tokens")
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
