"""What plain sockets take for the KV of a prompt, from paged GPU memory to paged GPU memory in another process."""

from __future__ import annotations

import statistics

from benchmarks.gpu.shapes import SHAPES, kv_bytes_per_token
from benchmarks.support.gpu_kv import BLOCK_TOKENS, GpuPool
from benchmarks.support.gpu_node import gpu_pair
from tollbridge.transfer.options import TransferOptions

STREAMS = (1, 2, 4, 8)
REPETITIONS = 5
_UNIT_TOKENS = {512: 512, 2048: 1024, 4096: 1024}  # prompts are moved as so many requests of this length


def ceiling_ms(shape: str) -> dict[str, float]:
    """Return the milliseconds by prompt length: the median of the number of streams that is best for it."""
    found: dict[str, float] = {}
    num_layers = SHAPES[shape]["num_hidden_layers"]
    block_bytes = kv_bytes_per_token(shape) * BLOCK_TOKENS // num_layers
    for unit in sorted(set(_UNIT_TOKENS.values())):
        pool = GpuPool(
            num_layers=num_layers,
            num_blocks=8 * unit // BLOCK_TOKENS,
            request_blocks=unit // BLOCK_TOKENS,
            block_bytes=block_bytes,
        )
        with gpu_pair(pool, TransferOptions()) as pair:
            for length in (length for length, each in _UNIT_TOKENS.items() if each == unit):
                arms = [
                    [pair.ceiling(length // unit, streams) for _ in range(REPETITIONS + 1)][1:] for streams in STREAMS
                ]
                found[str(length)] = 1e3 * min(map(statistics.median, arms))
    return found
