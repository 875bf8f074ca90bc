"""The KV pool of the GPU claims: Qwen2.5-7B's shape, its content known to both processes without being sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class GpuPool:
    """`num_layers` tensors of `num_blocks` blocks; a request has `request_blocks` of them, at random places."""

    num_layers: int = 28
    num_blocks: int = 4096
    request_blocks: int = 256
    block_bytes: int = 32 * 1024  # of one layer: 16 tokens x K and V x 4 KV heads x 128 x bf16

    @property
    def request_bytes(self) -> int:
        return self.num_layers * self.request_blocks * self.block_bytes

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers x {self.request_blocks} blocks x {self.block_bytes // 1024} KiB per request, "
            f"pool of {self.num_blocks}"
        )

    def layer(self, index: int) -> Any:
        """Return the content of a layer on the prefill side, uint8 `[num_blocks, block_bytes]` on the GPU."""
        import torch

        generator = torch.Generator(device="cuda").manual_seed(1000 + index)
        words = torch.randint(
            -(2**62), 2**62, (self.num_blocks, self.block_bytes // 8), generator=generator, device="cuda"
        )
        return words.view(torch.uint8)

    def prefill(self) -> list[Any]:
        return [self.layer(index) for index in range(self.num_layers)]

    def decode(self) -> list[Any]:
        """Return the layers of the decode side, zeros."""
        import torch

        shape = (self.num_blocks, self.block_bytes)
        return [torch.zeros(shape, dtype=torch.uint8, device="cuda") for _ in range(self.num_layers)]

    def tables(self, num_requests: int, *, seed: int) -> list[list[int]]:
        """Return the block tables of requests, disjoint."""
        blocks = np.random.default_rng(seed).permutation(self.num_blocks)
        size = self.request_blocks
        return [blocks[index * size : (index + 1) * size].tolist() for index in range(num_requests)]

    def is_equal(self, layers: list[Any], sent: list[list[int]], received: list[list[int]]) -> bool:
        """Return whether the decode side's `layers` hold what prefill had, request by request."""
        import torch

        source, target = torch.tensor(sent, device="cuda").view(-1), torch.tensor(received, device="cuda").view(-1)
        return all(torch.equal(self.layer(index)[source], layer[target]) for index, layer in enumerate(layers))


SEND_SEED, RECEIVE_SEED = 1, 2
