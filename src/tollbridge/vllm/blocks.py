"""vLLM's paged KV cache as a KVMemory whose smallest piece is a whole block.

Inside a block vLLM's layouts are not ordered by token: head-major on CPU (all K of a head, then all V, packed for the
instruction set), K apart from V on others. So a range of tokens is no run of bytes, but a block of one layer is. A
KVMemory's "token" is the smallest piece that it can ship, so this memory has blocks of one piece each, and a piece is
one of vLLM's blocks. Sender and receiver need not know: `Pieces` turns tokens into pieces on the way in.

The last block of a prompt is partly filled. It ships whole, and only once the whole prompt is published: from then on
nobody writes to it, so the checksum covers what is sent. What lies behind the prompt in it means nothing, and decode
overwrites it as it generates.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tollbridge.errors import StartupError
from tollbridge.transfer.base import KVMemory
from tollbridge.transfer.memory import BufferMemory, HostMemory
from tollbridge.transfer.rows import Bytes


@dataclass(frozen=True)
class Region:
    """The blocks of one layer, one after the other."""

    address: int
    num_bytes: int


class BlockMemory(HostMemory):
    """A KVMemory over host memory which vLLM owns and keeps for the life of the process."""

    block_size = 1  # pieces

    def __init__(self, regions: Sequence[Region], *, num_blocks: int, block_bytes: int) -> None:
        self.num_layers = len(regions)
        self.num_blocks = num_blocks
        self.granule_bytes = block_bytes
        self._layers = [
            BufferMemory(
                (ctypes.c_char * region.num_bytes).from_address(region.address),
                num_layers=1,
                num_blocks=num_blocks,
                block_size=1,
                token_bytes=block_bytes,
            )
            for region in regions
        ]

    def views(self, layer: int, block_table: Sequence[int], first_token: int, num_tokens: int) -> list[memoryview]:
        """Return writable views of pieces [first_token, first_token + num_tokens) of `layer`, neighbours merged."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is not within 0..{self.num_layers - 1}")
        return self._layers[layer].views(0, block_table, first_token, num_tokens)

    def maybe_blocks(self, layer: int) -> Bytes | None:
        return self._layers[layer].maybe_blocks(0)

    def regions(self) -> list[memoryview]:
        return [region for layer in self._layers for region in layer.regions()]


def block_memory(tensors: Sequence[Any], regions: Sequence[Region], *, num_blocks: int, block_bytes: int) -> KVMemory:
    """Return the memory of vLLM's KV tensors on their device, by layer; StartupError when that is not known."""
    device = tensors[0].device.type
    if device == "cpu":
        return BlockMemory(regions, num_blocks=num_blocks, block_bytes=block_bytes)
    if device != "cuda":
        raise StartupError(f"TollbridgeConnector does not move KV from {device} memory.")
    from tollbridge.transfer.cuda import CudaMemory

    return CudaMemory([_as_bytes(tensor, num_blocks, block_bytes) for tensor in tensors], block_size=1)


def _as_bytes(tensor: Any, num_blocks: int, block_bytes: int) -> Any:
    """Return the storage behind `tensor`, whose dimensions may be permuted, as uint8 [num_blocks, block_bytes]."""
    import torch

    offset = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), offset, (num_blocks, block_bytes), (block_bytes, 1))


@dataclass(frozen=True)
class Pieces:
    """Tokens to pieces, for blocks of `block_size` tokens."""

    block_size: int

    def covering(self, num_tokens: int) -> int:
        """Return the blocks that hold [0, num_tokens), the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def ready(self, end_token: int, num_prompt_tokens: int) -> int:
        """Return the blocks that will not be written any more once [0, end_token) of the prompt is computed."""
        if end_token >= num_prompt_tokens:
            return self.covering(num_prompt_tokens)
        return end_token // self.block_size

    def span(self, first_token: int, num_tokens: int) -> tuple[int, int]:
        """Return (first block, number of blocks) of a range that begins on a block's edge."""
        if first_token % self.block_size:
            raise ValueError(f"token {first_token} is not the first of a block of {self.block_size}")
        first = first_token // self.block_size
        return first, max(0, self.covering(first_token + num_tokens) - first) if num_tokens else 0
